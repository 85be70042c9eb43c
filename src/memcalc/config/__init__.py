"""Reading a config.json: values by key, declared dtypes, the stated quantization. Knows no model."""

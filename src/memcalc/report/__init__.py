"""The JSON contract, the assumptions, unused options, host memory."""

"""Several files and a launch line are one run."""

from pathlib import Path

import pytest
from support.paths import DATA

from memcalc.errors import ConfigError, UsageError
from memcalc.run_configs.read import read

FOLDER = DATA / "run_configs"


def files(*names: str) -> list[str]:
    return [str(FOLDER / name) for name in names]


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_an_accelerate_file_shards_a_training_file() -> None:
    found = read(files("trl/new_sft.yaml", "accelerate/fsdp1.yaml"))
    assert found.framework == "trl"
    assert (found.setup["parallel"], found.setup["gpus"]) == ("fsdp1", 4)
    assert found.setup["precision"] == "mixed-bf16"
    assert found.setup["reshard_after_forward"] is False


def test_a_deepspeed_file_stands_for_the_one_that_the_training_file_names() -> None:
    found = read(files("llama_factory/orpo_zero2.yaml", "deepspeed/zero2_old.json"))
    assert found.setup["parallel"] == "zero2"
    assert "zero_reduce_bucket_size" not in found.setup  # the preset's is not taken


def test_two_files_that_disagree_stop_as_the_run_would(tmp_path: Path) -> None:
    training = written(
        tmp_path, "a.yaml", "model_name_or_path: a/b\ndataset_name: x\ngradient_accumulation_steps: 8\nmax_length: 9\n"
    )
    engine = written(tmp_path, "b.json", '{"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4}')
    with pytest.raises(ConfigError, match="two files disagree"):
        read([training, engine])


def test_a_total_batch_fixes_accumulation(tmp_path: Path) -> None:
    training = written(
        tmp_path, "a.yaml", "model_name_or_path: a/b\ndataset_name: x\nper_device_train_batch_size: 2\nmax_length: 9\n"
    )
    engine = written(tmp_path, "b.json", '{"zero_optimization": {"stage": 1}, "train_batch_size": 64}')
    found = read([training, engine], ["accelerate", "launch", "--num_processes", "8", "train.py"])
    assert found.setup["grad_accum"] == 4


def test_a_launch_line_gives_the_number_of_gpus() -> None:
    found = read(files("hf/arguments.json"), ["torchrun", "--nproc_per_node=2", "--nnodes=3", "train.py"])
    assert found.setup["gpus"] == 6


def test_a_launch_line_overrides_the_file() -> None:
    path = files("axolotl/packed_qlora.yaml")
    line = ["axolotl", "train", path[0], "--micro-batch-size", "5", "--launcher", "accelerate", "--num-processes", "2"]
    found = read(path, line)
    assert found.setup["seq_len"] == 5 * 1536
    assert (found.setup["gpus"], found.setup["parallel"]) == (2, "ddp")


@pytest.mark.parametrize("words", [["--lora_rank", "20"], ["lora_rank=20"]])
def test_bare_options_override_the_file(words: list[str]) -> None:
    assert read(files("llama_factory/lora.yaml"), words).setup["lora_rank"] == 20


def test_a_line_alone_is_a_run() -> None:
    found = read([], ["trl", "sft", "--model_name_or_path", "a/b", "--dataset_name", "x", "--no_bf16"])
    assert (found.framework, found.model, found.setup["precision"]) == ("trl", "a/b", "fp32")


def test_a_line_of_another_framework_is_refused() -> None:
    with pytest.raises(ConfigError, match="make them agree"):
        read(files("axolotl/packed_qlora.yaml"), ["vllm", "serve", "a/b"])


def test_a_line_that_starts_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="starts no run"):
        read(files("axolotl/packed_qlora.yaml"), ["rm", "-rf", "x"])


def test_two_training_files_are_two_runs() -> None:
    with pytest.raises(ConfigError, match="a run of their own"):
        read(files("axolotl/packed_qlora.yaml", "trl/new_sft.yaml"))


def test_an_adapter_file_says_what_the_adapters_of_a_run_are() -> None:
    found = read(files("trl/no_cap.yaml", "peft/adapter_config.json"))
    assert (found.setup["lora_rank"], found.setup["lora_targets"], found.setup["dora"]) == (6, "q_proj,v_proj", True)


def test_accelerate_flags_are_its_file() -> None:
    line = "accelerate launch --use_deepspeed --zero_stage 3 --num_processes 4 --offload_optimizer_device cpu dpo.py"
    found = read([], [*line.split(), "--model_name_or_path", "a/b", "--dtype", "bfloat16", "--max_length", "64"])
    assert found.setup["parallel"] == "zero3"
    assert found.setup["cpu_offload"] == "optimizer"
    assert found.setup["precision"] == "bf16"
    assert "autocast" not in found.setup


def test_a_config_file_that_is_named_but_not_given_is_asked_for() -> None:
    found = read([], ["accelerate", "launch", "--config_file", "mine.yaml", "sft.py", "--model_name_or_path", "a/b"])
    assert any("mine.yaml" in sentence for sentence in found.asked)


def test_a_shipped_accelerate_file_is_known_by_name() -> None:
    line = ["accelerate", "launch", "--config_file", "examples/accelerate_configs/deepspeed_zero2.yaml", "sft.py"]
    found = read([], [*line, "--model_name_or_path", "a/b", "--dtype", "bfloat16"])
    assert (found.setup["parallel"], found.setup["gpus"]) == ("zero2", 8)


@pytest.mark.parametrize(
    ("name", "parallel", "offload"),
    [("ds_z3_offload_config.json", "zero3", "optimizer,parameters"), ("my_zero1.json", "zero1", None)],
)
def test_a_deepspeed_file_is_known_by_name(tmp_path: Path, name: str, parallel: str, offload: str | None) -> None:
    path = written(
        tmp_path, "a.yaml", f"model_name_or_path: a/b\ndataset_name: x\nmax_length: 9\ndeepspeed: x/{name}\n"
    )
    found = read([path])
    assert found.setup["parallel"] == parallel
    assert found.setup.get("cpu_offload") == offload


def test_the_release_moves_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "a.yaml", "model_name_or_path: a/b\nnum_generations: 8\nmax_completion_length: 64\n")
    old, new = read([path], release=(0, 18)), read([path])
    assert (old.setup["reference_model"], new.setup["reference_model"]) == ("copy", "none")
    assert (old.setup["activation_checkpointing"], new.setup["activation_checkpointing"]) == ("none", "full")
    assert (old.setup["precision"], new.setup["precision"]) == ("fp32", "mixed-bf16")
    assert old.setup["seq_len"] == 512 + 64
    assert "seq_len" not in new.setup


def test_a_shipped_torchtune_recipe_is_known_by_name() -> None:
    line = "tune run --nproc_per_node 2 lora_finetune_distributed --config llama3_2/3B_lora tokenizer.max_seq_len=512"
    found = read([], [*line.split(), "model.lora_rank=16"])
    assert (found.model, found.setup["lora_rank"], found.setup["seq_len"]) == ("llama3_2 3B", 16, 512)
    assert (found.setup["parallel"], found.setup["gpus"]) == ("fsdp2", 2)
    assert found.setup["lora_targets"] == "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


def test_llama_factory_starts_a_process_for_each_visible_gpu() -> None:
    path = files("llama_factory/lora.yaml")
    line = ["CUDA_VISIBLE_DEVICES=0,1,2", "llamafactory-cli", "train", "lora.yaml"]
    assert read(path, line).setup["gpus"] == 3
    assert read(path, ["NPROC_PER_NODE=2", "NNODES=4", *line[1:]]).setup["gpus"] == 8


def test_deepspeed_as_a_json_text() -> None:
    line = ["swift", "sft", "--model", "a/b", "--max_length", "9", "--deepspeed", '{"zero_optimization": {"stage": 1}}']
    assert read([], line).setup["parallel"] == "zero1"


def test_the_line_says_whose_training_arguments_they_are() -> None:
    found = read(
        files("hf/arguments.json"), ["trl", "sft", "--config", "arguments.json", "--model_name_or_path", "a/b"]
    )
    assert (found.framework, found.model) == ("trl", "a/b")


def test_a_file_of_a_repository_is_the_weights_that_are_loaded() -> None:
    assert read(files("llama_cpp/server.sh")).facts["weights"] == "Q8_0"
    assert read([], ["llama-server", "-hf", "a/b-GGUF"]).facts["weights"] == "Q4_K_M"


def test_adapters_under_zero3_are_checkpointed_in_the_old_way(tmp_path: Path) -> None:
    text = "model_name_or_path: a/b\nmax_length: 9\nuse_peft: true\ndtype: bfloat16\ndeepspeed: zero3.json\n"
    found = read([written(tmp_path, "a.yaml", text)])
    assert found.setup["checkpoint_reentrant"] is True
    assert found.setup["lora_dtype"] == "bf16"

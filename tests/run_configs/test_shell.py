"""The words of launch lines, and what a script itself assigns."""

import pytest

from memcalc.run_configs import shell
from memcalc.run_configs.launch import launches


def commands(text: str) -> list[list[str]]:
    return [command.words for command in shell.commands(text, "a.sh")]


def test_continued_lines_comments_and_quotes() -> None:
    text = "# swift sft --model no\nswift sft \\\n  --model 'a b' \\\n  --dataset x#500 # a comment\n"
    assert commands(text) == [["swift", "sft", "--model", "a b", "--dataset", "x#500"]]


def test_assignments_of_the_same_text_are_put_in() -> None:
    text = 'N=4\nexport MODEL="a/b"\nrun --n $N --m ${MODEL} --k ${K:-7} --e $(expr 16 / $N) --f $((N * 2))'
    assert commands(text)[-1] == ["run", "--n", "4", "--m", "a/b", "--k", "7", "--e", "4", "--f", "8"]


def test_what_is_set_from_outside_stays_unknown() -> None:
    assert commands("M=a\nM=$1\nrun --m $M --w $(nproc) --b `date`")[-1][:3] == ["run", "--m", "$M"]


def test_single_quotes_are_left_alone() -> None:
    assert commands("A=1\nrun --x '$A'")[-1] == ["run", "--x", "$A"]


def test_flags_on_lines_of_their_own_belong_to_the_command_above() -> None:
    assert commands("llama-server\n--ctx-size 4\n-ngl 9\n") == [["llama-server", "--ctx-size", "4", "-ngl", "9"]]


def test_a_quote_that_never_closes_is_no_end() -> None:
    assert ["swift", "sft", "--model", "a"] in commands("echo it's\nswift sft --model a\n")


@pytest.mark.parametrize(
    ("line", "world"),
    [
        ("torchrun --nproc_per_node=4 --nnodes 2 train.py --bf16", 8),
        ("torchrun --nproc_per_node gpu train.py --bf16", None),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py --bf16", 3),
        ("deepspeed --num_gpus 2 train.py --bf16", 2),
        ("deepspeed --include localhost:1,3,5 train.py --bf16", 3),
        ("deepspeed --master_port 9 train.py --bf16", None),
        ("tune run --nproc_per_node 4 full_finetune_distributed --config a/b", 4),
        ("python train.py --bf16", 1),
    ],
)
def test_number_of_gpus(line: str, world: int | None) -> None:
    (found,) = launches(shell.commands(line, "a.sh"))
    assert found.world == world


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("CUDA_VISIBLE_DEVICES=0 nohup accelerate launch --multi_gpu -m axolotl.cli.train ax.yml", "axolotl"),
        ("FORCE_TORCHRUN=1 llamafactory-cli train a.yaml lora_rank=4", "llamafactory"),
        ("uv run trl dpo --model_name_or_path a/b", "trl"),
        ("python -m vllm.entrypoints.openai.api_server --model a/b", "vllm"),
        ("docker run --gpus all ghcr.io/ggml-org/llama.cpp:server-cuda -m a.gguf", "llamacpp"),
        ("/opt/llama-server-b123 -m a.gguf", "llamacpp"),
        ("python unsloth-cli.py --model_name a/b", "unsloth"),
        ("python qlora.py --bits 4 --source_max_len 8", "script"),
        ("python run_clm.py --model_name_or_path a/b --block_size 8", "hf"),
        ("accelerate launch examples/scripts/sft.py --model_name_or_path a/b", "trl"),
        ("accelerate launch train.py --use_peft --lora_r 4", "trl"),
    ],
)
def test_what_a_line_starts(line: str, kind: str) -> None:
    (found,) = launches(shell.commands(line, "a.sh"))
    assert found.kind == kind


@pytest.mark.parametrize(
    "line", ["ls -l", "python prepare.py", "accelerate config", "swift infer --model a", "tune ls"]
)
def test_lines_that_start_no_run(line: str) -> None:
    assert launches(shell.commands(line, "a.sh")) == []

"""Optimizers: bytes per parameter by each source's formula, small tensors, host memory, and the command's table."""

import pytest
from support.cli_runs import refused, run
from support.reports import lines

from memcalc import ModelSpec, TrainingSetup, estimate
from memcalc.errors import UsageError
from memcalc.optim.weight import Weight
from memcalc.tables.optimizer_names import REFUSED, SPELLINGS
from memcalc.tables.optimizers import OPTIMIZERS, ROWS, optimizer

SIDE = 4096
COUNT = SIDE * SIDE
MATRIX, HALF = Weight((SIDE, SIDE), 4), Weight((SIDE, SIDE), 2)

SCALE = 4 / 256
"""An fp32 scale for each block of 256 elements of an 8-bit state (bitsandbytes)."""
FACTORS = 2 * SIDE / COUNT
"""A row and a column statistic, elements for each of a square matrix."""
GALORE = (2 * 128 * SIDE) / COUNT
"""Momentum and variance of a gradient projected to rank 128."""

TABLE: list[tuple[str, float, float, float]] = [
    # name, bytes a parameter of an fp32 matrix, of a 16-bit one, and of either in host memory
    ("adamw", 4 + 4, 2 + 2, 0),
    ("adam", 4 + 4, 2 + 2, 0),
    ("sgd", 0, 0, 0),
    ("sgd-momentum", 4, 2, 0),
    ("adagrad", 4, 2, 0),
    ("rmsprop", 4, 2, 0),
    ("adafactor", 4 * FACTORS, 2 * FACTORS, 0),
    ("adafactor-hf", 4 * FACTORS + 512 / COUNT, 4 * FACTORS + 512 / COUNT, 0),
    ("adamw-hf", 4 + 4, 2 + 2, 0),
    ("muon", 4, 2, 0),
    ("lion", 4, 2, 0),
    ("adamw-8bit", 2 + 2 * SCALE, 2 + 2 * SCALE, 0),
    ("lion-8bit", 1 + SCALE, 1 + SCALE, 0),
    ("paged-adamw", 0, 0, 8),
    ("paged-adamw-8bit", 2 * SCALE, 2 * SCALE, 2),
    ("paged-lion", 0, 0, 4),
    ("paged-lion-8bit", SCALE, SCALE, 1),
    ("adamw-bnb-32bit", 8, 8, 0),
    ("lion-32bit", 4, 4, 0),
    ("rmsprop-bnb", 4, 4, 0),
    ("rmsprop-8bit", 1 + SCALE, 1 + SCALE, 0),
    ("ademamix", 12, 12, 0),
    ("ademamix-8bit", 3 + 3 * SCALE, 3 + 3 * SCALE, 0),
    ("paged-ademamix", 0, 0, 12),
    ("paged-ademamix-8bit", 3 * SCALE, 3 * SCALE, 3),
    ("adamw-torchao-8bit", 2 + 2 * SCALE + 2048 / COUNT, 2 + 2 * SCALE + 2048 / COUNT, 0),
    ("adamw-torchao-4bit", 1 + 4 * SCALE + 1024 / COUNT, 1 + 4 * SCALE + 1024 / COUNT, 0),
    ("adamw-torchao-fp8", 2 + 2 * SCALE, 2 + 2 * SCALE, 0),
    ("adamw-bf16", 2 + 2, 2 + 2, 0),
    ("adamw-apex", 4 + 4, 4 + 4, 0),
    # An fp32 projection is a slice of the whole factor, which stays; a 16-bit one is a copy of it.
    ("galore-adamw", 4 * GALORE + 4, 2 * GALORE + 2 * 128 / SIDE, 0),
    ("galore-adamw-8bit", (2 + 2 * SCALE) * GALORE / 2 + 4, (2 + 2 * SCALE) * GALORE / 2 + 2 * 128 / SIDE, 0),
    ("apollo-adamw", 4 * (GALORE + 128 / SIDE), 2 * (GALORE + 128 / SIDE), 0),
    ("prodigy", 16, 8, 0),
    ("grokadamw", 12, 6, 0),
    ("lomo", 0, 0, 0),
    ("adalomo", 4 * FACTORS, 4 * FACTORS, 0),
    ("schedule-free-adamw", 4 + 4, 2 + 2, 0),
    ("schedule-free-radam", 4 + 4, 2 + 2, 0),
    ("schedule-free-sgd", 4, 2, 0),
]

MODEL = {
    "model_type": "llama",
    "hidden_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 872,
    "vocab_size": 70,
}


@pytest.mark.parametrize(("name", "wide", "half", "host"), TABLE, ids=[row[0] for row in TABLE])
def test_bytes_per_parameter(name: str, wide: float, half: float, host: float) -> None:
    row = OPTIMIZERS[name]
    assert sum(row.states(MATRIX).values()) / COUNT == pytest.approx(wide, abs=1e-9)
    assert sum(row.states(HALF).values()) / COUNT == pytest.approx(half, abs=1e-9)
    assert sum(row.host(MATRIX).values()) / COUNT == host
    assert row.source


def test_every_optimizer_has_a_formula() -> None:
    assert [row.name for row in ROWS] == [name for name, *_ in TABLE]


def test_the_table_of_the_command() -> None:
    wide = run("optimizers", env={"COLUMNS": "250"}).stdout
    lines = {line.split()[0]: line.split() for line in wide.splitlines()[1:]}
    assert set(lines) == set(OPTIMIZERS)
    shown = {name: (float(words[1]), float(words[2])) for name, words in lines.items()}
    for name, nbytes, _, host in TABLE:
        assert shown[name][0] == pytest.approx(nbytes, rel=0.06)
        assert shown[name][1] == host


@pytest.mark.parametrize(("count", "nbytes"), [(4095, 2 * 16384), (4096, 2 * (4096 + 512))])
def test_small_tensors_stay_in_32_bits(count: int, nbytes: int) -> None:
    """bitsandbytes: under 4,096 elements; each piece is rounded up to 512 bytes."""
    states = OPTIMIZERS["adamw-8bit"].states(Weight((count,), 4))
    assert sum(states.values()) == nbytes


def test_vectors_have_whole_statistics() -> None:
    """Adafactor factors matrices only, Muon steps a vector, an embedding and a head as AdamW does."""
    vector = Weight((4096,), 4)
    assert sum(OPTIMIZERS["adafactor"].states(vector).values()) == 4 * 4096
    assert sum(OPTIMIZERS["muon"].states(vector).values()) == 2 * 4 * 4096
    assert sum(OPTIMIZERS["muon"].states(Weight((SIDE, SIDE), 4, group="embedding")).values()) == 2 * 4 * COUNT


@pytest.mark.parametrize(("paged", "resident"), [("paged-adamw", 29_921_280), ("paged-lion", 14_960_640)])
def test_paged_states_are_those_of_large_weights(paged: str, resident: int) -> None:
    """What bitsandbytes' 32-bit states of 100,000 elements or more take (30 MB were measured on the GPU, unpaged)."""
    report = estimate(ModelSpec.from_config(MODEL), TrainingSetup(precision="bf16", optimizer=paged, seq_len=24))
    (line,) = (line for line in lines(report) if "paged in" in line)
    row = OPTIMIZERS[paged]
    large = [(320, 320)] * 12 + [(872, 320)] * 6 + [(320, 872)] * 3
    assert sum(sum(row.host(Weight(shape, 2)).values()) for shape in large) == resident
    assert f"{resident / 2**20:.1f} MiB of {paged} states" in line
    small = 7 * 320 + 2 * 70 * 320  # norms, embedding and head stay on the GPU
    assert report.components.optimizer_states.peak_bytes == pytest.approx(8 * resident / 29_921_280 * small, rel=0.01)


TRAINER = """
adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adafactor adamw_anyprecision
adamw_torch_4bit adamw_torch_8bit ademamix sgd adagrad adamw_bnb_8bit adamw_8bit ademamix_8bit lion_8bit
lion_32bit paged_adamw_32bit paged_adamw_8bit paged_ademamix_32bit paged_ademamix_8bit paged_lion_32bit
paged_lion_8bit rmsprop rmsprop_bnb rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit
galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise lomo adalomo
grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd apollo_adamw apollo_adamw_layerwise
stable_adamw adamw_hf adamw_apex_fused prodigy AdamW8bit PagedAdamW8bit ao_adamw_fp8 optimi_adamw
q_galore_adamw8bit q_apollo came_pytorch adopt_adamw dion muon badam adam_mini lion_pytorch torch.optim.AdamW
bitsandbytes.optim.PagedAdamW torchao.optim.AdamW4bit muon_8bit StableAdamW CPUOffloadOptimizer Muon8bit CAME soap
torch.optim.NAdam torch.optim.RAdam torch.optim.Adadelta torch.optim.Adamax torch.optim.ASGD torch.optim.Rprop
torch.optim.LBFGS torch.optim.SparseAdam bitsandbytes.optim.Adam8bit bitsandbytes.optim.SGD8bit shampoo adan
bitsandbytes.optim.LAMB8bit bitsandbytes.optim.LARS8bit bitsandbytes.optim.Adagrad8bit apex.optimizers.FusedAdam
bitsandbytes.optim.Adam AdamW32bit DeepSpeedCPUAdam torchtune.modules.optim.OptimizerInBackward flash_lion
"""
"""`OptimizerNames` of Transformers 5.24 and 4, and what axolotl, LLaMA-Factory, torchtune and their libraries add."""


@pytest.mark.parametrize("name", TRAINER.split())
def test_trainers_names_are_computed_or_refused_by_name(name: str) -> None:
    said = ""
    try:
        assert optimizer(name).name in OPTIMIZERS
    except UsageError as refusal:
        said = str(refusal)
    assert not said or "is not computed: " in said


def test_nothing_is_both_computed_and_refused() -> None:
    assert not SPELLINGS.keys() & REFUSED.keys()
    assert not OPTIMIZERS.keys() & (REFUSED.keys() | SPELLINGS.keys()) - {"ademamix"}
    assert {spelling.row for spelling in SPELLINGS.values()} <= OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("typed", "name", "impl", "in_backward"),
    [
        ("adamw_torch", "adamw", "foreach", False),
        ("adamw_torch_fused", "adamw", "fused", False),
        ("torch.optim.AdamW", "adamw", "foreach", False),
        ("adamw_bnb_8bit", "adamw-8bit", "fused", False),
        ("galore_adamw_layerwise", "galore-adamw", "for-loop", True),
        ("adafactor", "adafactor", "for-loop", False),
    ],
)
def test_one_name_in_the_answer(typed: str, name: str, impl: str, in_backward: bool) -> None:
    found = estimate(ModelSpec.from_config(MODEL), TrainingSetup(optimizer=typed, seq_len=24)).setup
    assert (found["optimizer"], found["optimizer_impl"], found["optimizer_in_backward"]) == (name, impl, in_backward)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--optimizer adamw-8bit --optimizer-impl foreach", ("adamw-8bit has no foreach", "fused")),
        ("--optimizer adamw-8bit --optimizer-impl for-loop", ("no for-loop", "fused")),
        ("--optimizer adamw-8bit --galore-rank 64", ("--galore-rank", "adamw-8bit")),
        ("--optimizer-in-backward --grad-accum 2", ("--optimizer-in-backward", "--grad-accum")),
        ("--optimizer lomo --grad-accum 4", ("--optimizer lomo", "--grad-accum")),
        ("--optimizer adamw-4bit", ("adamw-4bit", "memcalc optimizers")),
        ("--optimizer galore_adamw_layerwise --grad-accum 2", ("galore_adamw_layerwise", "--grad-accum")),
        ("--optimizer muon --optimizer-impl fused", ("muon has no fused", "for-loop")),
    ],
)
def test_what_an_optimizer_has_not(options: str, words: tuple[str, ...]) -> None:
    message = refused(2, "estimate", "--params", "1B", *options.split())
    assert all(word in message for word in words), message

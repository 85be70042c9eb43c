"""`PYTORCH_CUDA_ALLOC_CONF` is read as PyTorch reads it."""

import pytest

from memcalc.allocator.conf import AllocatorConf, parse_alloc_conf
from memcalc.errors import UsageError

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorConf()),
        ("expandable_segments:True", AllocatorConf(expandable_segments=True)),
        (" max_split_size_mb : 100 ,", AllocatorConf(max_split_size=100 * MIB)),
        ("large_segment_size_mb:11", AllocatorConf(large_segment_size=11 * MIB)),
        ("garbage_collection_threshold:0.8,backend:native", AllocatorConf(garbage_collection_threshold=0.8)),
        ("pinned_num_register_threads:4", AllocatorConf(without_effect=("pinned_num_register_threads",))),
        ("expandable_segments:True,expandable_segments:False", AllocatorConf()),
    ],
)
def test_settings(text: str, expected: AllocatorConf) -> None:
    assert parse_alloc_conf(text) == expected


@pytest.mark.parametrize(
    ("text", "nbytes", "block"),
    [
        ("roundup_power2_divisions:4", 3 * MIB + 5, 3_670_016),
        ("roundup_power2_divisions:4", 300 * MIB + 5, 335_544_320),
        ("roundup_power2_divisions:1", 3 * MIB + 5, 3_146_240),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 600 * MIB + 5, 805_306_368),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 300 * MIB + 5, 314_573_312),
        ("roundup_power2_divisions:[>:8]", 600 * MIB + 5, 671_088_640),
        ("roundup_power2_divisions:[4:8]", 3 * MIB + 5, 3_407_872),
        ("roundup_power2_divisions:[4:8,2:2]", 3 * MIB + 5, 4_194_304),
        ("roundup_power2_divisions:[4:8,16:2,>:1]", 31_350_052, 33_554_432),
        ("", 1000, 1024),
    ],
)
def test_divisions_round_as_pytorch_does(text: str, nbytes: int, block: int) -> None:
    """torch.cuda.memory_allocated() of PyTorch 2.14 after torch.empty(nbytes) under this setting."""
    assert parse_alloc_conf(text).rounded(nbytes) == block


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments:true", "True or False"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:1.5", "at least 20"),
        ("max_split_size_mb", "name:value"),
        ("large_segment_size_mb:10", "more than 10"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[3:2]", "power of two"),
        ("roundup_power2_divisions:[4:x]", "power of two"),
        ("backend:cudaMallocAsync", "native"),
        ("expandable_segment:True", "did you mean 'expandable_segments'"),
        ("foo:1", "it takes expandable_segments"),
    ],
)
def test_what_pytorch_refuses_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_alloc_conf(text)

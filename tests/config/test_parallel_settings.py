"""The sizes of `trainer.parallel` make up the ranks, or are refused with what would."""

import pytest

from areal_gym.config import Layout, TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.trainer.parallel.rank_group import Ranks


def config(*overrides):
    return load_config(overrides=[f"trainer.{text}" for text in overrides]).trainer


def test_one_rank_is_the_default():
    assert config().layout == Layout()


def test_shard_is_what_the_others_leave():
    layout = config("num_ranks=8", "parallel.replicate=2", "parallel.expert=4").layout
    assert layout == Layout(replicate=2, shard=4, expert=4)
    assert (layout.num_ranks, layout.num_data_ranks, layout.fsdp_size) == (8, 8, 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("num_ranks=3", "parallel.replicate=2"), "does not divide trainer.num_ranks = 3"),
        (("num_ranks=2", "parallel.replicate=4"), "use trainer.num_ranks=4"),
        (("num_ranks=4", "parallel.shard=2"), "use trainer.num_ranks=2"),
        (("num_ranks=2", "parallel.shard=0"), "use auto"),
        (("num_ranks=2", "parallel.shard=all"), "trainer.parallel.shard"),
        (("num_ranks=2", "parallel.tensor=0"), "trainer.parallel.tensor"),
        (("num_ranks=8", "parallel.expert=3"), "or one of 1, 2, 4, 8"),
        (("num_ranks=8", "parallel.replicate=2", "parallel.expert=8"), "or one of 1, 2, 4"),
        (("num_ranks=2", "parallel.expert=2", "lora.rank=4"), "lora.targets=[q_proj"),
        (("parallel.experts=2",), "unknown key 'trainer.parallel.experts'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    assert message in caught.value.message


def test_old_name_of_expert_ranks_is_understood(tmp_path):
    recipe = tmp_path / "old.yaml"
    recipe.write_text("trainer: {num_ranks: 4, expert_ranks: 2}\n")
    assert load_config(recipe).trainer.layout.expert == 2
    assert load_config(recipe, ["trainer.parallel.expert=4"]).trainer.layout.expert == 4
    assert load_config(recipe, ["trainer.expert_ranks=4"]).trainer.layout.expert == 4
    assert TrainerConfig(num_ranks=2, expert_ranks=2).layout.expert == 2


def test_ranks_of_one_group_get_the_same_rows():
    layout = Layout(replicate=2, shard=2, context=2, tensor=3)
    all_ranks = [Ranks(rank, layout) for rank in range(layout.num_ranks)]
    parts = [ranks.share(range(100), [1] * 100) for ranks in all_ranks]
    for ranks, part in zip(all_ranks, parts, strict=True):
        assert part == parts[ranks.data_rank * 6]
    assert sorted(m for part in parts[::6] for m in part) == list(range(100))

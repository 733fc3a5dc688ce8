"""Changes of a cluster that a profile does not follow are refused, not passed over."""

import dataclasses

import pytest

import trainplan
from search.models import model
from trainplan.errors import InputError
from trainplan.profile.profile import Profile
from trainplan.situation import refuse_fixed


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    model().save(path)
    return str(path)


def test_rates_that_a_profile_was_made_with_cannot_be_changed_afterwards(saved):
    """Its seconds are fixed; a model's name is estimated anew, and follows."""
    there = ("4xTitanRTX", 16)
    with pytest.raises(
        InputError, match=r"--set memory_rate=100GB/s: the profile's seconds .* were saved.*by its name"
    ):
        trainplan.predict(saved, "ddp", *there, set=["memory_rate=100GB/s"])
    with pytest.raises(InputError, match="memory_rate=100GB/s: the profile's seconds"):
        trainplan.recommend(saved, *there, set={"memory_rate": "100GB/s"})
    name = "gpt:layers=1,hidden=64,heads=2,seq=16,vocab=64,batch=2"
    for cluster in ("1xH200", "1xTitanRTX"):
        usual, slow = (
            trainplan.predict(name, "dp=1", cluster, set=changes).prediction.compute_s
            for changes in ([], ["memory_rate=1GB/s"])
        )
        assert slow > 2 * usual
    with pytest.raises(InputError, match="were measured here, and would not change with it"):
        refuse_fixed(dataclasses.replace(Profile.load(saved), kind="measured"), ["memory_rate=100GB/s"], saved=False)

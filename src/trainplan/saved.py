"""A profile that was given with a model: refused where it is of another one, or of one that runs otherwise.

Whoever brings a saved profile does not wait for torch: names are compared as they are written, and only what is
written otherwise is loaded, to see whether it means the same.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from trainplan.errors import InputError
from trainplan.workload import options
from trainplan.workload.origin import origin

if TYPE_CHECKING:
    from trainplan.profile.profile import Profile

FREE = ("batch", "lr")  # what may differ: the batch is asked of the profile, and rates change neither time nor memory


def parted(name: str) -> tuple[str, dict[str, str]]:
    """What a model is, of a file without its folder; and its options.

    >>> parted("gpt:layers=2,hidden=8"), parted("models/net.py:build,width=3")
    (('gpt', {'layers': '2', 'hidden': '8'}), ('net.py:build', {'width': '3'}))
    """
    path, colon, rest = name.rpartition(".py:")
    if colon:  # a profile may have been made in another folder, or on another machine
        head = f"{path.rpartition('/')[2]}.py"
    else:
        head, colon, rest = name.partition(":") if ":" in name else name.partition(",")
    first, given = options.split(rest) if rest else ("", {})
    return f"{head}:{first}" if first else head, given


def batch_in(name: str, profile: Profile) -> int:
    """The batch that a model's name asks for; that of its profile where it says nothing."""
    given = parted(name)[1] if name != profile.workload else {}
    if "batch" not in given:
        return profile.batch
    return int(options.value(given["batch"], options.Option("batch", profile.batch, minimum=1), name))


def refuse_others(profile: Profile, name: str, cluster: str, compile: bool) -> None:
    """Refuse a profile that is not of the model of this name, as that is here and now."""
    _refuse_named(profile, name, cluster, compile)
    _refuse_changed(profile, name, cluster, compile)


def _refuse_named(profile: Profile, name: str, cluster: str, compile: bool) -> None:
    """Refuse a profile of another name, or of other options."""
    if name == profile.workload:
        return
    was, asked = _meant(profile.workload), _meant(name)
    if asked == was:
        return
    if not name.startswith("module:"):  # which a name does not bring back
        from trainplan.workload.load import load

        asked = _meant(load(name).name)  # spelled out, as the profile's is
    if asked == was:
        return
    why = f"the model is {name}"
    if asked[0] == was[0]:
        keys = [key for key in {**asked[1], **was[1]} if asked[1].get(key) != was[1].get(key)]
        each = [f"{key}={was[1].get(key, 'its default')}" for key in keys]
        why += f", and the profile was made with {', '.join(each)}"
    own = _own(name, cluster, compile)
    raise InputError(f"--profile of {profile.workload}", why, f"its own profile ({own}), or leaving --profile out")


def _refuse_changed(profile: Profile, name: str, cluster: str, compile: bool) -> None:
    """Refuse a profile of a file that says something else than the user's does now.

    A file that only lies elsewhere is the same model: profiles are made on other machines, too.
    """
    here = origin(name)
    if here is None:
        return
    made, own = profile.provenance, _own(name, cluster, compile)
    if not made.digest:
        why = f"a profile of {profile.workload} that does not say what its file said is taken to be of {here.path}"
        warnings.warn(f"{why}; {own} makes one that does", stacklevel=2)
    elif made.digest != here.digest:
        why = f"it was made of {made.source} ({made.made}), "
        also = " (or what that imports)"
        why += f"which has changed since{also}" if made.source == here.path else f"and {here.path}{also} says otherwise"
        raise InputError(f"a profile of {profile.workload}", why, f"its own profile: {own}")


def _own(name: str, cluster: str, compile: bool) -> str:
    """The command that makes the profile that is missing."""
    from trainplan.report.lines import command  # here, so that importing the package stays instant

    return command("profile", name, cluster=cluster, compile=compile, output="profile.json")


def _meant(name: str) -> tuple[str, dict[str, str]]:
    head, given = parted(name)
    return head, {key: value for key, value in given.items() if key not in FREE}


def refuse_otherwise(profile: Profile, compile: bool, name: str, cluster: str, here: bool) -> None:
    """Refuse eager seconds for blocks that are compiled, and the other way round. `here`: this machine could tell."""
    if profile.compiled == compile:
        return
    made = "compiled" if profile.compiled else "eager"
    asked = f"{'--compile' if compile else 'no --compile'} with a profile of {profile.workload}"
    why = f"its seconds are of {made} blocks, and {'eager' if profile.compiled else 'compiled'} ones take others"
    own = _own(name, cluster, compile)
    if compile:  # what is not here is estimated, which is of eager blocks
        raise InputError(asked, why, f"{own}, or leaving --compile out" if here else "leaving --compile out")
    raise InputError(asked, why, f"--compile, or {own}")

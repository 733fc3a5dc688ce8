"""One list that drives the equality and timeline tests of every system that runs."""

from dataclasses import dataclass, field

from trainplan.plan.order import GIVEN, known
from trainplan.plan.placement import placement
from trainplan.plan.plan import WORDS, Plan, plan
from trainplan.plan.rules import CHUNKED, SLICED
from trainplan.plan.systems import SYSTEMS
from trainplan.program.exchanges import BY_ROUNDS, HIERARCHICAL

# Orders of work as files hold them, by the number of ranks: with backward passes that are whole and others that are
# split, with two stages on one of the ranks, and with micro-batches that overtake each other between two ranks.
ORDER_OF = {
    2: ("0F0,0F1,0F2,2F0,2B0,2F1,2I1,2W1,0I0,2F2,2B2,0W0,0B1,0B2", "1F0,1F1,1F2,1B0,1I1,1W1,1B2"),
    3: ("0F0,0F1,0B0,0I1,0W1", "1F0,1F1,3F0,3B0,3F1,3B1,1I0,1B1,1W0", "2F0,2F1,2I0,2B1,2W0"),
    4: (
        "0F0,0F1,0F2,0B1,0B0,0B2",
        "1F1,1F0,1F2,1B1,1I0,1B2,1W0",
        "2F1,2F0,2B1,2F2,2B0,2B2",
        "3F1,3I1,3F0,3B0,3W1,3F2,3B2",
    ),
}
BOTH_WAYS = ("0F0,1F1^1,1I1^1,1W1^1,0B0,0F2,0B2", "1F0,0F1^1,1B0,0B1^1,1F2,1B2")
BLOCKS = {"chain": 6, "residual": 6, "tied": 8, "sleeping": 4, "gpt": 5, "judge": 5}


@dataclass(frozen=True)
class Case:
    """A system on a model: the plan, the batch sizes of the steps, and what else is asked of the workload."""

    key: str
    model: str
    choices: dict
    sizes: tuple[int, ...] = (8, 7, 8)
    optimizer: str = "sgd"
    fields: dict = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return plan(blocks=BLOCKS[self.model], key=self.key, **self.choices)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in (*self.choices.items(), *self.fields.items())]
        return "-".join([self.key, self.model, self.optimizer, *words]).replace(" ", "").replace("'", "")


def _cases() -> list[Case]:
    cases = []
    for model in ("chain", "residual", "tied"):
        middle = {"chain": 3, "residual": 2, "tied": 4}[model]
        quarters = {"chain": (1, 2, 5), "residual": (1, 2, 3), "tied": (1, 3, 4)}[model]
        # The batch of 7 is no multiple of anything here: replicas and micro-batches are uneven.
        cases += [
            Case("single", model, {}),
            Case("accumulate", model, {"micro": 3}),
            Case("accumulate", model, {"micro": 3, "recompute": "full"}),
            Case("ddp", model, {"dp": 2, "bucket": 200}),
            Case("ddp", model, {"dp": 4, "bucket": 100_000}),
            Case("ddp", model, {"dp": 2, "micro": 2, "bucket": 300}),
            Case("ddp", model, {"dp": 2, "micro": 2, "bucket": 300, "recompute": "full"}),
            Case("naive", model, {"pp": 2, "micro": 2, "stages": (middle,)}),
            Case("naive", model, {"pp": 4, "micro": 1, "stages": quarters}),
            Case("gpipe", model, {"pp": 2, "micro": 3, "schedule": "gpipe", "stages": (1,), "recompute": "full"}),
            Case("gpipe", model, {"pp": 4, "micro": 4, "schedule": "gpipe", "stages": quarters}),
            Case("dapple", model, {"pp": 2, "micro": 5, "schedule": "1f1b", "stages": (middle,)}),
            Case("dapple", model, {"pp": 4, "micro": 3, "schedule": "1f1b", "stages": quarters, "recompute": "full"}),
            Case(
                "dapple", model, {"dp": 2, "pp": 2, "micro": 2, "schedule": "1f1b", "stages": (middle,), "bucket": 200}
            ),
            Case(
                "gpipe",
                model,
                {"dp": 2, "pp": 2, "micro": 3, "schedule": "gpipe", "stages": (1,), "bucket": 500, "recompute": "full"},
            ),
        ]
    adam = {"dp": 2, "pp": 2, "micro": 2, "schedule": "1f1b", "stages": (3,), "bucket": 200}
    cases += [
        Case("single", "tied", {}, optimizer="adamw"),
        Case("accumulate", "tied", {"micro": 2}, optimizer="adamw"),
        Case("ddp", "residual", {"dp": 2, "bucket": 200}, optimizer="adamw"),
        Case("naive", "residual", {"pp": 2, "stages": (2,)}, optimizer="adamw"),
        Case("gpipe", "tied", {"pp": 2, "micro": 2, "schedule": "gpipe", "stages": (2,)}, optimizer="adamw"),
        Case("dapple", "chain", adam, optimizer="adamw"),
        # Recomputed blocks: alone, with replicas, in both orders of a pipeline.
        Case("accumulate", "residual", {"micro": 2, "recompute": "full"}, optimizer="adamw"),
        Case("ddp", "tied", {"dp": 2, "micro": 2, "bucket": 300, "recompute": "full"}, optimizer="adamw"),
        Case("gpipe", "chain", {**adam, "schedule": "gpipe", "recompute": "full"}, optimizer="adamw"),
        Case(
            "dapple",
            "tied",
            {"pp": 2, "micro": 3, "schedule": "1f1b", "stages": (3,), "recompute": "full"},
            optimizer="adamw",
        ),
        # Gradient clipping over stages and replicas; the limit is low enough to bite at every step.
        Case("single", "tied", {}, fields={"clip_norm": 0.05}),
        Case("ddp", "chain", {"dp": 2, "bucket": 200}, fields={"clip_norm": 0.05}),
        Case("dapple", "tied", {**adam, "stages": (2,)}, fields={"clip_norm": 0.05}),
        Case(
            "gpipe",
            "residual",
            {"pp": 4, "micro": 2, "schedule": "gpipe", "stages": (1, 2, 3)},
            fields={"clip_norm": 0.05},
        ),
    ]
    # Groups of parameters, some of them empty on some stages, with learning rates that change at every step.
    grouped = [
        Case("ddp", "residual", {"dp": 2, "bucket": 200}, optimizer="grouped_adamw", fields={"schedule": "cosine"}),
        Case(
            "gpipe", "tied", {"pp": 4, "micro": 2, "schedule": "gpipe", "stages": (1, 3, 4)},
            optimizer="grouped_adamw", fields={"schedule": "onecycle"},
        ),
        Case(
            "dapple", "residual", {"pp": 2, "micro": 3, "schedule": "1f1b", "stages": (2,)}, optimizer="grouped_sgd",
            fields={"schedule": "lambda"},
        ),
        Case("dapple", "tied", {**adam, "stages": (4,)}, optimizer="grouped_adamw", fields={"schedule": "onecycle"}),
    ]  # fmt: skip
    # Replicas that have more samples than others: as their devices are fast.
    uneven = [
        Case("ddp", "residual", {"dp": 2, "bucket": 200, "ratio": (3, 1)}),
        Case("ddp", "chain", {"dp": 4, "bucket": 200, "ratio": (1, 2, 3, 1), "exchange": "ring"}),
        Case("zero1", "tied", {"dp": 2, "zero": 1, "bucket": 200, "ratio": (1, 3)}),
        Case("dataparallel", "chain", {"dp": 2, "bucket": 200, "ratio": (2, 1), "exchange": "dataparallel"}),
        Case("dapple", "tied", {**adam, "stages": (4,), "ratio": (3, 1)}),
    ]
    return cases + grouped + uneven + ORDERS + _sharded() + EXCHANGES + SERVED + DECIDED + PRELOADED + _offloaded()


def _sharded() -> list[Case]:
    """Every stage of sharing out, on 2 and on 4 ranks: alone, with micro-batches, recomputation, clipping and groups of
    parameters, in pipelines, and in groups of replicas. The embedding that is also the output layer is a unit of its
    own, or is held by two stages and stays whole."""
    pipeline = {"dp": 2, "pp": 2, "micro": 2, "bucket": 200, "stages": (4,)}
    cases = []
    for zero in (1, 2, 3):
        key, own = f"zero{zero}", {"zero": zero, "bucket": 200}
        cases += [
            Case(key, "tied", {"dp": 2, **own}),
            Case(key, "tied", {"dp": 4, "zero": zero, "bucket": 10_000}),
            Case(key, "residual", {"dp": 2, "micro": 2, **own}, optimizer="adamw", fields={"clip_norm": 0.05}),
            Case(key, "tied", {**pipeline, "zero": zero, "schedule": "1f1b"}),
            Case(key, "residual", {"dp": 2, "micro": 2, **own, "recompute": "full"}),
        ]
    grouped = {"optimizer": "grouped_adamw", "fields": {"schedule": "onecycle"}}
    return [
        *cases,
        Case("hsdp", "tied", {"dp": 4, "shard": 2, "zero": 3, "bucket": 200}),
        Case("hsdp", "residual", {"dp": 4, "shard": 2, "zero": 1, "bucket": 200}, fields={"clip_norm": 0.05}),
        Case("zero2", "tied", {"dp": 2, "zero": 2, "bucket": 200}, **grouped),
        Case("zero3", "tied", {**pipeline, "zero": 3, "schedule": "gpipe"}, fields={"clip_norm": 0.05}),
        # A stage whose only weights are those that another one has, too: nothing of it is shared out.
        Case("zero1", "tied", {**pipeline, "zero": 1, "schedule": "1f1b", "stages": (1,)}, fields={"clip_norm": 0.05}),
        Case("zero3", "tied", {**pipeline, "zero": 3, "schedule": "1f1b", "stages": (1,)}, fields={"clip_norm": 0.05}),
        Case("zero3", "tied", {**pipeline, "zero": 3, "schedule": "gpipe", "recompute": "except-last"}),
        Case("zero1", "tied", {**pipeline, "zero": 1, "schedule": "zb-h1"}),
    ]


def _offloaded() -> list[Case]:
    """Activations that go away: on 1, 2 and 4 ranks, with every stage of sharing out and with none, with micro-batches
    of which some stay, recomputation, skip connections and clipping, and in pipelines whose micro-batches wait."""
    own = {"offload": "activations", "bucket": 200}
    two, shared = {**own, "dp": 2, "micro": 2}, {**own, "dp": 2, "zero": 3}
    line = {**own, "pp": 2, "micro": 3}
    return [
        Case("zero-r", "tied", {**shared, "away": ((3,),), "preload": "on"}),
        Case("zero-r", "residual", {**shared, "micro": 2, "away": ((2, 1),), "recompute": "full"}),
        Case("zero-r", "tied", {**shared, "dp": 4, "away": ((2,),)}, optimizer="adamw", fields={"clip_norm": 0.05}),
        Case(
            "zero-r", "tied", {**shared, "pp": 2, "stages": (4,), "micro": 2, "schedule": "1f1b", "away": ((3,), (1,))}
        ),
        Case("accumulate", "residual", {**own, "micro": 2, "away": ((4, 1),)}),
        Case("ddp", "residual", {**two, "away": ((4,),)}),
        Case("zero1", "residual", {**two, "zero": 1, "away": ((2,),)}),
        Case("zero2", "tied", {**two, "zero": 2, "away": ((0, 3),), "overlap": "off"}),
        Case("gpipe", "residual", {**line, "stages": (3,), "schedule": "gpipe", "away": ((3, 2, 0), (2, 1, 1))}),
        Case(
            "gpipe",
            "tied",
            {**line, "stages": (4,), "schedule": "gpipe", "away": ((4, 4, 0), (3, 2, 0)), "recompute": "except-last"},
        ),
        Case(
            "interleaved",
            "tied",
            {**line, "chunks": 2, "stages": (1, 3, 5), "schedule": "interleaved", "away": ((1,), (2,), (1,), (1,))},
        ),
    ]


def _served() -> list[Case]:
    """Gradients that go to where the optimizer is: to the first worker, or to servers."""
    bites = {"clip_norm": 0.05}
    root = {"dp": 2, "bucket": 300, "exchange": "dataparallel", "preload": "off"}
    step = {"dp": 2, "bucket": 300, "exchange": "ps-bsp", "servers": 1}
    two = {**step, "servers": 2, "split": 8}
    pipeline, but_last = {"dp": 1, "pp": 2, "micro": 2}, {"recompute": "except-last"}
    return [
        Case("dataparallel", "tied", root),
        Case("dataparallel", "residual", {**root, "dp": 3, "micro": 2}),
        Case("dataparallel", "tied", {**root, "dp": 4, "preload": "given"}, optimizer="adamw", fields=bites),
        Case("dataparallel", "residual", {**root, "dp": 3, "preload": "on"}),
        Case("ps-bsp", "tied", step),
        Case("ps-bsp", "residual", {**step, "dp": 3, "bucket": 200}),
        Case("ps-bsp", "tied", {**two, "micro": 2, "recompute": "full"}),
        Case("ps-bsp", "residual", two, optimizer="grouped_adamw", fields={"schedule": "cosine"}),
        Case("ps-bsp", "chain", {**two, "dp": 1, "servers": 3}, optimizer="adamw"),
        # Stages that push and pull each their own, with an embedding that two of them hold; one pipeline, and two.
        Case("ps-bsp", "tied", {**two, **pipeline, "schedule": "1f1b", "stages": (4,)}),
        Case("ps-bsp", "tied", {**step, **pipeline, "schedule": "zb-v", "chunks": 2, "stages": (2, 4, 6)}),
        Case("ps-bsp", "residual", {**two, **pipeline, "schedule": "gpipe", "stages": (2,), **but_last}),
        Case("ps-bsp", "tied", {**step, **pipeline, "dp": 2, "schedule": "1f1b", "stages": (3,)}),
    ]


SERVED = _served()
SCHEDULES = (*WORDS["schedule"], GIVEN)
VARIANTS = {"1f1b-early": "1f1b", "chimera-doubled": "chimera"}  # orders of work that are another's, a little changed
RANKS = (2, 3, 4)


def ranks_of(word: str) -> tuple[int, ...]:
    """The numbers of ranks on which an order of work is tested: Chimera has only even ones."""
    return tuple(ranks for ranks in RANKS if not (word.startswith("chimera") and ranks % 2))


def _plain(word: str, ranks: int, model: str, optimizer: str = "sgd") -> Case:
    """An order of work on so many ranks, which deal with one micro-batch more than they are. (One that is given says
    itself with how many.)"""
    if word == GIVEN:
        cuts = _cuts(model, known(ORDER_OF[ranks]).stages)
        return Case("dapple", model, {"stages": cuts, "order": ORDER_OF[ranks], "schedule": word}, optimizer=optimizer)
    said = f"schedule={VARIANTS.get(word, word)}"
    key = next(row.key for row in SYSTEMS.values() if said in (row.choices or "").split())
    chunks = {"chunks": 2} if word in CHUNKED else {}
    slices = {"slices": (3, 2, 2, 1)} if word == SLICED else {}
    cuts = _cuts(model, ranks * chunks.get("chunks", 1))
    more = {"stages": cuts, "micro": ranks + 1, "bucket": 200, "schedule": word}
    return Case(key, model, {"pp": ranks, **chunks, **slices, **more}, optimizer=optimizer)


def _cuts(model: str, depth: int) -> tuple[int, ...]:
    """Between so many stages, as equal as they can be."""
    return tuple(BLOCKS[model] * cut // depth for cut in range(1, depth))


def _grid() -> list[Case]:
    """Every order of work on 2, 3 and 4 ranks with a tied embedding; on one number of ranks with batch norm, dropout in
    every block and a skip connection over all cuts; and on one with AdamW."""
    cases = []
    for word in SCHEDULES:
        model = "gpt" if word == SLICED else "tied"
        cases += [_plain(word, ranks, model) for ranks in ranks_of(word)]
        cases.append(_plain(word, ranks_of(word)[-1], model, "adamw"))
        if word != SLICED:  # of sequences; their model has dropout, too
            cases.append(_plain(word, ranks_of(word)[1], "residual"))
    return cases


def _orders() -> list[Case]:
    """What orders of work can be asked for besides: replicas, recomputation, tables of one's own, gradient clipping."""
    two, three, four = {"pp": 2, "stages": (1,)}, {"pp": 3, "stages": (1, 2)}, {"pp": 4, "stages": (1, 2, 3)}
    chunked = {"pp": 2, "chunks": 2, "stages": (1, 2, 3)}
    shared = {"bucket": 200}  # where stages have several copies
    orders = [
        ("dapple", "1f1b", {**two, **shared, "micro": 4, "spread": (2, 1)}),
        ("dapple", "1f1b", {**two, **shared, "micro": 4, "spread": (1, 3)}),
        ("interleaved", "interleaved", {**chunked, "micro": 3, "recompute": "full"}),
        ("zb-h1", "zb-h1", {**two, **shared, "micro": 3, "dp": 2}),
        ("chimera", "chimera", {**four, **shared, "micro": 4, "pairs": 2}),
        ("chimera", "chimera", {**two, **shared, "micro": 2, "dp": 2, "recompute": "full"}),
    ]
    # Any table, ranks with different numbers of stages among them; and an order that is given, in two directions.
    orders += [
        ("dapple", "1f1b", {"pp": 2, "stages": (1, 2, 3), "micro": 4, "placement": placement(1, ((0, 1, 1, 0),))}),
        ("zb-h1", "zb-h1", {"pp": 3, "stages": (1, 2, 3), "micro": 4, "placement": placement(1, ((0, 1, 2, 1),))}),
        ("gpipe", "gpipe", {"dp": 2, "pp": 2, "stages": (1, 2), "micro": 2, "placement": placement(2, ((0, 1, 0),))}),
        ("gems", "given", {"stages": (2,), **shared, "order": BOTH_WAYS}),
    ]
    cases = [
        Case(key, model, {**choices, "schedule": schedule})
        for model in ("residual", "tied")
        for key, schedule, choices in orders
    ]
    one = {"pp": 3, "stages": (1, 3), "micro": 1, "slices": (4, 4)}
    cases.append(Case("terapipe", "gpt", {**one, "schedule": "terapipe"}))
    mixed = {"pp": 2, "stages": (2,), "micro": 2, "slices": (3, 2, 3), "dp": 2, **shared}
    cases.append(Case("terapipe", "judge", {**mixed, "schedule": "terapipe"}))
    # Slices that are recomputed: later ones have read their keys and values.
    again = {"pp": 2, "stages": (2,), "micro": 2, "slices": (3, 2, 3), "schedule": "terapipe"}
    cases.append(Case("terapipe", "gpt", {**again, "recompute": "full"}))
    cases.append(Case("terapipe", "gpt", {**again, "recompute": "except-last"}))
    cases.append(Case("terapipe", "judge", {**again, **shared, "dp": 2, "recompute": "full"}))
    found = {"schedule": "lockstep", "micro": 3}
    but_last = {"micro": 3, "recompute": "except-last"}
    bites, one_cycle = {"clip_norm": 0.05}, {"schedule": "onecycle"}
    v_shape = {"pp": 2, "chunks": 2, "stages": (1, 2, 4), "micro": 3, "schedule": "zb-v"}
    return [
        *cases,
        Case("torchgpipe-as-found", "tied", {**two, **shared, **found, **but_last, "dp": 2}),
        # The pass that completes the gradients is the one that is not recomputed, or it is another.
        Case("dapple", "residual", {**two, **shared, **but_last, "schedule": "1f1b", "dp": 2}),
        Case("gpipe", "tied", {**three, **but_last, "schedule": "gpipe"}),
        Case("chimera", "tied", {"pp": 2, "micro": 3, "schedule": "chimera", "stages": (3,)}, fields=bites),
        Case("zb-v", "tied", v_shape, fields=bites),
        Case("zb-v", "tied", v_shape, optimizer="grouped_adamw", fields=one_cycle),
    ]


def _exchanges() -> list[Case]:
    """Every exchange on 2, 3 and 4 replicas, with micro-batches, and where stages of a pipeline are replicated.

    Hierarchical ones want two nodes of two copies: four replicas, or two pairs of pipelines in opposite directions.
    """
    cases = []
    for word in BY_ROUNDS:
        key = word if word in SYSTEMS else "ddp"
        how = {"exchange": word, "bucket": 200}
        if word == HIERARCHICAL:
            both_ways = {"pp": 4, "stages": (1, 2, 3), "micro": 4, "schedule": "chimera", "pairs": 2}
            cases += [
                Case(key, "tied", {"dp": 4, "micro": 2, **how, "node": 2}, sizes=(8, 9, 8)),
                Case("chimera", "residual", {**both_ways, **how, "node": 2}),
            ]
            continue
        pipelines = {"dp": 2, "pp": 2, "micro": 2, "schedule": "1f1b", "stages": (2,)}
        cases += [
            Case(key, "chain", {"dp": 2, "micro": 2, **how}),
            Case(key, "chain", {"dp": 3, **how}, optimizer="adamw"),
            Case(key, "residual", {"dp": 4, **how, "bucket": 100_000}),
            Case("dapple", "tied", {**pipelines, **how}),
        ]
    two = {"dp": 2, "micro": 2, "bucket": 200, "exchange": "ring"}
    # A bucket after each recomputed block; and sums that the host waits for, whose norm is clipped.
    cases.append(Case("ddp", "residual", {**two, "recompute": "full"}))
    return [*cases, Case("ddp", "chain", {**two, "overlap": "off"}, fields={"clip_norm": 0.05})]


def _decided() -> list[Case]:
    """Exchanges whose order is decided while running, each on 2 and 4 ranks: with tied weights, and with batch norm,
    dropout and uneven local batches; with several micro-batches, small gradients put together; with AdamW; in groups
    whose rates change."""
    numbers = {
        "horovod": {"threshold": 400, "cycle": 1e-3},
        "p3": {"slice": 100},
        "bytescheduler": {"slice": 64, "credit": 150},
        "pace": {"slice": 150},
    }
    cases = []
    for number, (word, own) in enumerate(numbers.items()):

        def case(model: str, dp: int, word: str = word, own: dict = own, **more) -> Case:
            fused = {"fused": FUSED[model]} if word == "pace" else {}
            optimizer, fields = more.pop("optimizer", "sgd"), more.pop("fields", {})
            choices = {"dp": dp, "exchange": word, **own, **fused, **more}
            return Case(word, model, choices, optimizer=optimizer, fields=fields)

        together = {"threshold": 300} if word in ("p3", "bytescheduler") else {}
        cases += [case("tied", 4), case("residual", 2, micro=2, **together), case("tied", 2, optimizer="adamw")]
        if number % 2:
            cases.append(case("residual", 2, optimizer="grouped_adamw", fields={"schedule": "onecycle"}))
    clipped = {"dp": 2, "exchange": "horovod", "threshold": 10**6, "cycle": 5e-4}
    cases.append(Case("horovod", "tied", clipped, fields={"clip_norm": 0.05}))
    # Every stage has an agenda of its own: in orders with one stage a rank and with several, with backward passes in
    # two parts or recomputed, and where only one stage has copies.
    stages = {"dp": 2, "pp": 2, "micro": 2, "exchange": "horovod", **numbers["horovod"]}
    four = {**stages, "chunks": 2, "stages": (2, 4, 6)}
    pair = {"dp": 2, "pp": 2, "micro": 2}
    credit, pace = ({"exchange": word, **numbers[word]} for word in ("bytescheduler", "pace"))
    pace["fused"] = FUSED["residual"]
    return [
        *cases,
        Case("horovod", "tied", {**stages, "schedule": "1f1b", "stages": (4,)}, fields={"clip_norm": 0.05}),
        Case("horovod", "tied", {**four, "schedule": "zb-v"}),
        Case("horovod", "residual", {**stages, "schedule": "gpipe", "stages": (2,), "recompute": "except-last"}),
        Case("horovod", "tied", {**stages, "dp": 1, "schedule": "1f1b", "stages": (5,), "spread": (2, 1)}),
        # By priority the first forward pass of every stage takes its steps, block by block.
        Case("p3", "residual", {**pair, "exchange": "p3", **numbers["p3"], "schedule": "1f1b", "stages": (2,)}),
        Case("bytescheduler", "residual", {**pair, **credit, "schedule": "zb-v", "chunks": 2, "stages": (1, 2, 3)}),
        Case(
            "pace", "residual", {**pair, **pace, "schedule": "interleaved", "chunks": 2, "stages": (1, 2, 3)},
            optimizer="grouped_adamw", fields={"schedule": "onecycle"},
        ),
    ]  # fmt: skip


def _preloaded() -> list[Case]:
    """Batches that are loaded as steps begin or ahead of them: on one rank and several, where stages read other things
    of a batch, or nothing of it, or only of some micro-batches; and beside whatever else crosses steps."""
    two, three = {"pp": 2, "micro": 3, "stages": (2,)}, {"pp": 3, "micro": 3, "stages": (2, 5)}
    slices = {"slices": (3, 2, 3), "schedule": "terapipe"}
    rows = [
        ("tied", "on", {}),
        ("residual", "off", {"micro": 2}),
        ("tied", "on", {"dp": 2, "bucket": 200}),
        ("residual", "off", {"dp": 2, "micro": 2, "bucket": 300}),
        ("tied", "on", {**three, "schedule": "1f1b"}),
        ("residual", "off", {**two, "schedule": "gpipe", "recompute": "full"}),
        ("tied", "on", {**two, "schedule": "chimera", "bucket": 200}),
        ("gpt", "on", {**two, **slices}),
        ("tied", "on", {"dp": 2, "zero": 3, "bucket": 200}),
        ("tied", "on", {"dp": 2, "exchange": "p3", "slice": 100}),
        ("tied", "on", {"dp": 2, "bucket": 300, "exchange": "ps-bsp", "servers": 1}),
    ]
    return [Case("preload", model, {**choices, "preload": word}) for model, word, choices in rows]


FUSED = {"tied": (4, 3, 5, 3), "residual": (2, 6, 1, 7)}  # gradients of each fused tensor
DECIDED = _decided()
PRELOADED = _preloaded()
GRID = _grid()
ORDERS = GRID + _orders()
EXCHANGES = _exchanges()
CASES = _cases()
# One of each system, the first that is listed, and a pipeline with replicas.
_PLAIN = [case for case in CASES if case.model in ("tied", "gpt") and case.optimizer == "sgd" and not case.fields]
ONE_EACH = list({case.key: case for case in reversed(_PLAIN)}.values())
ONE_EACH += [next(case for case in _PLAIN if {"dp", "pp"} <= case.choices.keys())]

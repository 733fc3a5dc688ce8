"""A part of the benchmark suite in a limited time, for `campaign.py`: `trainplan bench run`, with an exit code.

    python benchmarks/suite.py --for 280 --out suite --hard --workers 4 --systems single,ddp,zero1,zero3,dapple,chimera

All options but `--for` are those of `trainplan bench run`. As long as there is anything left, the exit code is that of
a measurement that wants to be called again.
"""

import argparse
import sys

import typer

from trainplan import api, cli
from trainplan.bench import limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    limit.add_option(parser)
    options, words = parser.parse_known_args()
    command = typer.main.get_command(cli.bench).commands["run"]  # type: ignore[attr-defined]
    asked = command.make_context("bench run", words).params
    asked.pop("json")
    if options.limit != float("inf"):
        asked["minutes"] = options.limit / 60
    answer = api.bench_run(**asked)
    print(answer)
    if answer.unfinished:
        sys.exit(limit.UNFINISHED)


if __name__ == "__main__":
    main()

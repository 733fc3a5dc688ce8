"""What torchrun starts on every rank: `torchrun --nproc-per-node N -m trainplan.run JOB.json`."""

from trainplan.engine.worker import main

if __name__ == "__main__":
    main()

"""`python -m trainplan`, for where the package is on the path and not installed."""

from trainplan.cli import main

if __name__ == "__main__":
    main()

"""Train with `python -m smoleagle`."""

from smoleagle.train import main

if __name__ == "__main__":
    main()

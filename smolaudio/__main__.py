"""Train with `python -m smolaudio`. Worker processes do not import this module, so they start without transformers."""

from smolaudio.train import main

if __name__ == "__main__":
    main()

"""Train with `python -m smolvision`. Worker processes do not import this module, so they start without transformers."""

from smolvision.train import main

if __name__ == "__main__":
    main()

"""Train with `python -m smolvideo`. Worker processes do not import this module, so they start without transformers."""

from smolvideo.train import main

if __name__ == "__main__":
    main()

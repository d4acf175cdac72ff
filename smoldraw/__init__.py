"""smoldraw: small diffusion transformers that draw shapes, trained here. README.md is their model card.

    prompts.py       prompts, and pictures or clips that they describe, generated from a seed
    render.py        pictures of shapes, drawn with torch
    architecture.py  the models: stock components of diffusers and transformers, and files that hold a folder
    judge.py         a classifier that finds the shapes of a picture, and whether they are what a prompt says
    train.py         `python -m smoldraw`: training and its results
    evaluate.py      pictures of held-out prompts, drawn by diffusers' pipelines, and what the judge says

The server needs only the weights: `engine/checkpoints/merge.py` unpacks them into a diffusers folder.
"""

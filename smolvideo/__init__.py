"""smolvideo: smolvision trained further, to understand clips of moving shapes. README.md is its model card.

    clips.py         clips and their frames, generated from a seed
    questions.py     questions about a clip, with the answers
    chats.py         clips and questions as chats, chats as token ids, and batches of them
    architecture.py  the model: smolvision's tower and SmolLM2 as a SmolVLM, whose connector makes 16 tokens of a frame
    model.py         which parameters are trained, and the loss
    train.py         `python -m smolvideo`: training and its results
    evaluate.py      greedy answers to held-out questions, by transformers or by a server that is sent video files

The server needs only the weights: `engine/checkpoints/merge.py` merges them with smolvision into a model folder.
"""

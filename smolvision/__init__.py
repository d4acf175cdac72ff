"""smolvision: a small vision-language model of our own, SmolLM2-135M-Instruct that was taught to see (README.md is its card).

    images.py         scenes and their pictures, made from a seed
    questions.py      what can be asked of a scene, with the answer
    conversations.py  scenes and questions as chats, and chats as token ids
    architecture.py   the model: a SigLIP tower, LLaVA's projector, low-rank changes of the language model
    batches.py        chats made by worker processes while the model trains
    lora.py model.py  what of the model learns, and from what
    train.py          `python -m smolvision`: the training, and its results
    evaluate.py       greedy answers to held-out questions

The server needs the file of weights alone: `engine/checkpoints/merge.py` makes a model folder of it and SmolLM2.
"""

"""Tiny models that hear, of the kind of Audio Flamingo 3, with random weights."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration, WhisperFeatureExtractor

WINDOW_SECONDS = 2
HIDDEN = 64
EOS = 2
_SPECIAL = ["<pad>", "<s>", "</s>", "<sound>", "<|im_start|>", "<|im_end|>"]
TOKENS = {token: index for index, token in enumerate(_SPECIAL)}
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<sound>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_audio_flamingo(path: Path) -> Path:
    """Fill a folder like a checkpoint's, and return it. A second of sound is 25 tokens."""
    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    text = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": HIDDEN, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "tie_word_embeddings": True,
    }  # fmt: skip
    audio = {
        "model_type": "audioflamingo3_encoder", "num_mel_bins": 80, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_source_positions": 50 * WINDOW_SECONDS,
    }  # fmt: skip
    config = AudioFlamingo3Config(
        text_config=text, audio_config=audio, audio_token_id=TOKENS["<sound>"], tie_word_embeddings=True
    )
    torch.manual_seed(0)
    model = AudioFlamingo3ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # of a size that makes attention, and sounds, matter
            parameter.data.normal_(0.0, 0.3)
    stored = model.state_dict()
    del stored["lm_head.weight"]  # tied, which transformers does not know of this class
    model.save_pretrained(path, state_dict=stored)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": EOS}))
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_SECONDS, return_attention_mask=True)
    extractor.save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "AudioFlamingo3Processor"}))
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(_TEMPLATE)
    return path

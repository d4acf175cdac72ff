"""The model in training: which parameters are trained, and the two losses."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, WhisperFeatureExtractor

from smolaudio.architecture import ENCODER, FEATURES, RANK, VOCABULARY, language_config, taken
from smolaudio.batches import Batch
from smolaudio.conversations import AUDIO_TOKEN_ID
from smolvision.lora import add_low_rank
from smolvision.student import ChatStudent


class Projector(nn.Module):
    """The projector from the encoder's space to the language model's, as in Audio Flamingo."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inputs, outputs)
        self.linear_2 = nn.Linear(outputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear_2(functional.gelu(self.linear_1(x)))
        return out


class Student(ChatStudent):
    """Projector and low-rank adapters are trained in float32; SmolLM2, in `dtype`, and Whisper's encoder are frozen.

    The projector is also trained by CTC to write what is said with the language model's own embeddings of tokens, by
    which it learns in seconds where the words are. The scale and the embedding of no token are not saved.
    """

    def __init__(self, base: Path, whisper: Path, spoken: list[int], start: Path | None, dtype: torch.dtype) -> None:
        """Load SmolLM2 and Whisper from the folders `base` and `whisper`.

        `spoken` are the tokens of what is said, after one that stands for none. `start` is a file written by training.
        """
        super().__init__()
        config = language_config(base)
        self.language: Any = AutoModel.from_config(AutoConfig.for_model(**config | {"dtype": "float32"}))
        self.read_language(base, VOCABULARY, dtype)
        self.encoder: Any = AutoModel.from_config(AutoConfig.for_model(**ENCODER | {"dtype": "float32"}))
        self._read_encoder(whisper / "model.safetensors")
        self.projector = Projector(ENCODER["hidden_size"], config["hidden_size"])
        changes = add_low_rank(self.language, RANK, "", "language_model.model.")
        whole = {f"multi_modal_projector.{name}": tensor for name, tensor in self.projector.named_parameters()}
        self.trained = {**whole, **changes}
        self.register_buffer("spoken", torch.tensor(spoken), persistent=False)
        rows = self.language.embed_tokens.weight[spoken].float()
        self.scale = nn.Parameter(torch.tensor(8.0 / rows.square().sum(-1).mean().item()).log())
        self.nothing = nn.Parameter(torch.zeros(rows.shape[1]))
        self.bias = nn.Parameter(torch.zeros(()))
        features = WhisperFeatureExtractor(**{key: value for key, value in FEATURES.items() if "type" not in key})
        self.samples = features.n_samples
        self.register_buffer("mel", torch.tensor(features.mel_filters, dtype=torch.float32).T, persistent=False)
        self.register_buffer("hann", torch.hann_window(400), persistent=False)
        self.continue_from(start)

    def _read_encoder(self, path: Path) -> None:
        """Read the encoder as it ships: rounded to bfloat16, with the positions of one window."""
        own = dict(self.encoder.named_parameters())
        with safe_open(path, "pt") as file:
            for name, (source, shape) in taken(self.encoder).items():
                tensor = file.get_tensor(source)[: shape[0]]
                own[name.removeprefix("audio_tower.")].data.copy_(tensor.to(torch.bfloat16))
        self.encoder.requires_grad_(False)
        self.encoder.eval()

    def hear(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projector's vectors of all recordings [recordings, positions, hidden], and how many each has."""
        with torch.no_grad():
            frames = -(-batch.lengths // 160)
            mask = torch.arange(self.samples // 160, device=frames.device) < frames[:, None]
            mel = self._log_mel(batch.sounds)
            features = self.encoder(mel, input_features_mask=mask.long()).last_hidden_state
        return self.projector(features), ((frames - 1) // 2 + 1 - 2) // 2 + 1

    @torch.autocast("cuda", enabled=False)
    def _log_mel(self, sounds: torch.Tensor) -> torch.Tensor:
        """Return what transformers' WhisperFeatureExtractor computes, [recordings, 80, frames]."""
        padded = functional.pad(sounds.float() / 32768, (0, self.samples - sounds.shape[1]))
        spectrum = torch.stft(padded, 400, 160, window=self.hann, return_complex=True)[..., :-1].abs().square()
        mel = (self.mel @ spectrum).clamp(min=1e-10).log10()
        return (torch.maximum(mel, mel.amax((1, 2), keepdim=True) - 8) + 4) / 4

    def spelling_loss(self, batch: Batch, vectors: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the mean CTC loss of what is said, with similarity to tokens' embeddings as logits."""
        table = self.language.embed_tokens.weight[self.spoken].float()
        table = torch.cat([self.nothing[None], table[1:]])
        bias = functional.pad(self.bias[None], (0, len(table) - 1))
        logits = vectors.float() @ table.T * self.scale.exp() + bias
        return functional.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1),
            batch.spoken,
            counts,
            batch.spoken_lengths,
            zero_infinity=True,
        )

    def answer_loss(
        self, batch: Batch, vectors: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss of the answers' tokens, and the share that is predicted correctly."""
        heard = vectors[torch.arange(vectors.shape[1], device=counts.device) < counts[:, None]]
        return self.loss_of_answers(batch.ids, batch.said, AUDIO_TOKEN_ID, heard)

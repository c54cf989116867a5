"""Tokenizers: bytes, or a `tokenizer.json` of Hugging Face's `tokenizers`, which enters the house here alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from proxies.data.tokens import DataError

DOCUMENT_END = 0  # of the bytes: NUL, which text does not hold
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")
MIN_BPE_VOCAB, MAX_BPE_VOCAB = 257, 2**18
"""Entries of a trained BPE: 256 bytes and the end token; as many as the largest one in use (Gemma 3's)."""


class BytesTokenizer:
    """Every byte of UTF-8 its own id, and NUL after each document.

    At proxy sizes the tables of a learned vocabulary would be most of the model.
    """

    name = "bytes"
    vocab_size = 256
    end_id = DOCUMENT_END

    def encode(self, texts: list[bytes]) -> NDArray[np.uint32]:
        """Ids of the texts, joined, the end id after each."""
        end = bytes([DOCUMENT_END])
        return np.frombuffer(end.join(texts) + end, dtype=np.uint8).astype(np.uint32)


class FileTokenizer:
    """What a `tokenizer.json` says, and its end-of-document token after each text.

    Text is only ever text: where it spells a special token, it is not that token. Nothing is put around documents,
    cut off or padded, whatever the file says.

    Args:
        file: a `tokenizer.json`.
        end_token: the token that ends a document; None for the first of the usual names that the file knows.

    Raises:
        DataError: the file cannot be read, or does not know the end token.
    """

    def __init__(self, file: Path, end_token: str | None) -> None:
        from tokenizers import Tokenizer

        try:
            self.content = file.read_bytes()
            self.name = f"sha256:{hashlib.sha256(self.content).hexdigest()}"
            self._tokenizer = Tokenizer.from_str(self.content.decode())
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        except Exception as error:  # `tokenizers` raises nothing more specific
            reason = str(error).partition("\n")[0]
            raise DataError(f"{file} is not a tokenizer.json of Hugging Face's tokenizers: {reason}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"{file} has no tokens")
        self.vocab_size = max(vocabulary.values()) + 1
        choices = END_TOKENS if end_token is None else (end_token,)
        known = next((token for token in choices if token in vocabulary), None)
        if known is None:
            raise DataError(
                f"{file} has no token {' or '.join(choices)}: name with --end-token the token that ends a document"
            )
        self.end_id = vocabulary[known]

    def encode(self, texts: list[bytes]) -> NDArray[np.uint32]:
        """Ids of the texts, joined, the end id after each.

        Raises:
            UnicodeDecodeError: a text is not UTF-8.
        """
        encodings = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        end = np.array([self.end_id], dtype=np.uint32)
        return np.concatenate([part for e in encodings for part in (np.array(e.ids, dtype=np.uint32), end)])


Tokenizer = BytesTokenizer | FileTokenizer


def load_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """The tokenizer of `--tokenizer`: `bytes`, or the path of a `tokenizer.json`.

    Raises:
        DataError: the file cannot be read, or does not know the end token; or bytes with an end token.
    """
    if name != "bytes":
        return FileTokenizer(Path(name), end_token)
    if end_token is not None:
        raise DataError(f"--end-token {end_token}: the byte tokenizer ends documents by NUL; name a file's tokenizer")
    return BytesTokenizer()


def train_bpe(texts: Sequence[bytes], vocab_size: int) -> bytes:
    """Train a byte-level BPE and return its `tokenizer.json`.

    Id 0 is the end-of-document token `<|endoftext|>`. Equal texts give equal bytes: ties between
    merges are broken by id.

    Raises:
        DataError: the texts have too few different words for so many entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.decode() for text in texts], trainer)
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise DataError(f"train_bpe = {vocab_size}: the text gives only {size} entries; ask for fewer, or add text")
    return bytes(tokenizer.to_str(), "utf-8")

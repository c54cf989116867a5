"""Tokenizers: the bytes of UTF-8, or a `tokenizer.json` of Hugging Face's `tokenizers`.

This is the only module that imports `tokenizers`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import read_plain
from forerun._proxies.data.tokenizer_process import (
    BATCH_SECONDS,
    BYTES_PER_SECOND,
    START_SECONDS,
    TokenizerProcess,
    serve,
)
from forerun._proxies.data.tokens import DataError, explain_read_errors

DOCUMENT_END = 0
"""End id of the byte tokenizer: NUL, which is removed from texts."""
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "<\uff5cend▁of▁sentence\uff5c>",  # DeepSeek's: its bars are full-width (U+FF5C)
    "[EOS]",
)
"""Usual names of end tokens, in order of preference."""
CONFIG_FILE = "tokenizer_config.json"
MAX_TOKENIZER_BYTES = 2**28
"""Maximum size of a tokenizer's file; the largest in use have about 35 MB."""
MIN_BPE_VOCAB, MAX_BPE_VOCAB = 257, 2**18
"""Limits for the size of a trained BPE: 256 bytes and the end token, and the largest vocabulary in
use (Gemma 3)."""


class BytesTokenizer:
    """A tokenizer with one id per byte of UTF-8, and NUL after each document.

    At the sizes of proxies, the embedding of a learned vocabulary would be most of the model.
    """

    name = "bytes"
    vocab_size = 256
    end_id = DOCUMENT_END

    def encode(self, texts: list[bytes]) -> NDArray[np.uint32]:
        """Return the ids of the texts in one array, with the end id after each text."""
        end = bytes([DOCUMENT_END])
        return np.frombuffer(end.join(texts) + end, dtype=np.uint8).astype(np.uint32)


class FileTokenizer:
    """A tokenizer from a `tokenizer.json`, with its end-of-document token after each text.

    A text that spells a special token is encoded as ordinary text. Documents are not truncated,
    padded, or wrapped in special tokens, whatever the file says. Another process loads and applies
    the file (`forerun._proxies.data.tokenizer_process`).

    Args:
        file: Path of a `tokenizer.json`.
        end_token: Token that ends a document; None to choose it by `choose_end_token`.

    Raises:
        DataError: The file cannot be read, or does not have the end token.
    """

    def __init__(self, file: Path, end_token: str | None) -> None:
        self._file = file
        with explain_read_errors(file):
            self.content = read_plain(file, MAX_TOKENIZER_BYTES)
        self.name = f"sha256:{hashlib.sha256(self.content).hexdigest()}"
        self._process = TokenizerProcess(file, __name__)
        try:
            text = self.content.decode()
        except UnicodeDecodeError:
            raise DataError(f"{file} is not a tokenizer.json: it is not UTF-8") from None
        loaded = self._process.ask({"file": text}, START_SECONDS)
        vocabulary: dict[str, int] = loaded["vocabulary"]
        self.vocab_size = max(vocabulary.values()) + 1
        token, reason = choose_end_token(file, vocabulary, loaded["special"], end_token)
        self.end_id = vocabulary[token]
        self.end_reason = f"{token} (id {self.end_id}), {reason}"
        """The end token and the reason for the choice, for messages."""

    def encode(self, texts: list[bytes]) -> NDArray[np.uint32]:
        """Return the ids of the texts in one array, with the end id after each text.

        Raises:
            DataError: The tokenizer fails, or takes longer than its limit.
        """
        seconds = BATCH_SECONDS + sum(map(len, texts)) / BYTES_PER_SECOND
        request = {"texts": [text.decode() for text in texts], "end_id": self.end_id}
        return np.array(self._process.ask(request, seconds), dtype=np.uint32)


def choose_end_token(
    file: Path, vocabulary: Mapping[str, int], special: Sequence[str], end_token: str | None
) -> tuple[str, str]:
    """Choose the token that ends a document.

    The order of preference is: the token that the user named; `eos_token` of the
    `tokenizer_config.json` in the file's folder; a usual name that the file marks as special.

    Args:
        file: The tokenizer's file.
        vocabulary: Id by token.
        special: Tokens that the file marks as special.
        end_token: Token that the user named; None if the user named none.

    Returns:
        The token, and the reason for the choice.

    Raises:
        DataError: There is no such token, or the configuration cannot be read.
    """
    if end_token is not None:
        if end_token not in vocabulary:
            raise DataError(
                f"{file} has no token {end_token}: name with --end-token the token that ends a "
                "document"
            )
        return end_token, "as --end-token says"
    configured = _read_config(file.parent / CONFIG_FILE).get("eos_token")
    if isinstance(configured, dict):
        configured = configured.get("content")
    if configured in vocabulary:
        return str(configured), f"the eos_token of {CONFIG_FILE}"
    note = f" ({CONFIG_FILE} says {configured}, which the file does not have)" if configured else ""
    for token in END_TOKENS:
        if token in special:
            return token, f"a usual name that the file marks as special{note}"
    raise DataError(
        f"{file} has no special token {' or '.join(END_TOKENS)}{note}: name with --end-token the "
        "token that ends a document"
        + (f"; its special tokens are {', '.join(sorted(special)[:20])}" if special else "")
    )


def _read_config(path: Path) -> dict[str, object]:
    """Return a tokenizer's configuration; empty if there is none.

    Raises:
        DataError: The file exists and cannot be read.
    """
    try:
        config = json.loads(read_plain(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise DataError(
            f"{path} cannot be read: {reason}; repair it, or name the end token with --end-token"
        ) from error
    return config if isinstance(config, dict) else {}


class _TokenizerServer:
    """Answers the requests of a `FileTokenizer` in the child process."""

    _tokenizer: Any = None

    def answer(self, request: dict[str, Any]) -> object:
        """Load a tokenizer's file, or return the ids of texts with the end id after each."""
        if "file" in request:
            return self._load(request["file"])
        encodings = self._tokenizer.encode_batch_fast(request["texts"], add_special_tokens=False)
        end_id = request["end_id"]
        return [id_ for encoding in encodings for id_ in (*encoding.ids, end_id)]

    def _load(self, content: str) -> dict[str, object]:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise ValueError(
                f"it is not a tokenizer.json of Hugging Face's tokenizers: {error}"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError("it has no tokens")
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        return {
            "vocabulary": vocabulary,
            "special": [token.content for token in added if token.special],
        }


Tokenizer = BytesTokenizer | FileTokenizer


def load_tokenizer(name: str, end_token: str | None = None) -> Tokenizer:
    """Load the tokenizer that `--tokenizer` names.

    Args:
        name: `bytes`, or the path of a `tokenizer.json`.
        end_token: Token that ends a document; None to choose it by `choose_end_token`.

    Raises:
        DataError: The file cannot be read or does not have the end token, or an end token is given
            for the byte tokenizer.
    """
    if name != "bytes":
        return FileTokenizer(Path(name), end_token)
    if end_token is not None:
        raise DataError(
            f"--end-token {end_token}: the byte tokenizer ends documents with NUL; name a "
            "tokenizer.json with --tokenizer, or omit --end-token"
        )
    return BytesTokenizer()


def train_bpe(texts: Sequence[bytes], vocab_size: int) -> bytes:
    """Train a byte-level BPE and return its `tokenizer.json`.

    Id 0 is the end-of-document token `<|endoftext|>`. The same texts give the same bytes: ties
    between merges are broken by id.

    Args:
        texts: Documents in UTF-8.
        vocab_size: Number of entries, including the 256 bytes and the end token.

    Raises:
        DataError: The texts have too few different words for so many entries.
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
        raise DataError(
            f"train_bpe = {vocab_size}: the text gives only {format_counted(size, 'entry')}; "
            "choose a smaller vocabulary, or add text"
        )
    return bytes(tokenizer.to_str(), "utf-8")


if __name__ == "__main__":
    serve(_TokenizerServer().answer, int(sys.argv[1]))

"""Documents of a stream to token ids, as pretraining learns them: whole.

Owns what a row that holds no document does. Refuses to know how text becomes ids (`tokenise.py`)
and ids samples.
"""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from toolkit.config.settings import DataConfig
from toolkit.data.examples.recognise import PIECES
from toolkit.data.sources.row_values import BadRow
from toolkit.data.sources.rows import Source
from toolkit.data.sources.text import document_value
from toolkit.data.tokens.encoder import EncodedExample
from toolkit.data.tokens.tokenise import document_frame, ids_of
from toolkit.errors import DataError


class DocumentEncoder:
    """Rows of a stream to documents, one by one, with the ids that `tokenise` gives the same rows.

    A document of any length is one example, learned whole; an empty one has no token. What `labels`
    and masks say is not read. Copies in forked or spawned processes work.

    Args:
        source: of documents; its `rows` are not read.
        tokenizer: None only where the rows are tokenised already.
        cfg: `append_eos` and `on_bad_row` are read.
        vocab_size: rows of the model's embedding.

    Raises:
        DataError: the rows are text, and there is no tokenizer.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase | None,
        cfg: DataConfig,
        vocab_size: int,
    ) -> None:
        self.source, self.cfg, self.vocab_size = source, cfg, vocab_size
        self.column = source.layout.columns[0]
        if source.layout.format == "tokenised":
            return
        if tokenizer is None:
            raise DataError(
                f"{source.where}: expected a tokenizer, since the documents are text; set "
                "model.tokenizer_name_or_path, or give data with a column input_ids"
            )
        self.tokenizer, self.frame = tokenizer, document_frame(tokenizer, cfg)

    def __call__(self, stored: dict[str, Any], number: int) -> EncodedExample | BadRow:
        """Return the document of a stored row; where it is left out, its place and why.

        Args:
            stored: the row.
            number: of the row in its pass.

        Raises:
            DataError: the row holds no document and `cfg.on_bad_row` is `error`; or a token id has
                no embedding, whatever that says: the tokenizer or the model is the wrong one.
        """
        at = (stored, number)
        try:
            ids = self._ids(self.source.row(stored))
        except BadRow as bad:
            if self.cfg.on_bad_row == "error":
                raise self.source.refusal(at, bad) from bad
            return BadRow(f"{self.source.place(at)}: {bad}", bad.reason)
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise DataError(
                f"{self.source.place(at)}: expected token ids from 0 to {self.vocab_size - 1} (the "
                f"model's vocabulary size is {self.vocab_size}), got {wrong}; the data needs the "
                "tokenizer of this model, or the model a larger embedding (model.resize_embeddings)"
            )
        return EncodedExample(np.array(ids, np.int32), [(0, len(ids))] if ids else [])

    def _ids(self, row: dict[str, Any]) -> list[int]:
        value = document_value(row, self.column)
        if not isinstance(value, str):
            return value
        part = row if self.source.layout == PIECES else {"start": True, "end": True}
        ids = ids_of(self.tokenizer, value)
        return self.frame.around(ids, part["start"], part["end"])

"""Turns text into a token file that Megatron reads, byte by byte.

The vocabulary is the 256 byte values and an end-of-document token (256), so nothing has to be
downloaded: by default the text is the sources of Python's standard library. The files are written
with Megatron's own builder, in an order that depends on the paths alone.

    python examples/prepare_text.py --output out/text
    python examples/prepare_text.py --output out/text --input my_corpus/ notes.txt
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

END_OF_DOCUMENT = 256
VOCABULARY = 257


def standard_library() -> list[Path]:
    """The sources of Python's standard library, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return sorted(
        file for file in root.rglob("*.py") if not skipped & set(file.relative_to(root).parts)
    )


def text_files(path: Path) -> list[Path]:
    """The file itself, or all files of a folder that hold no NUL byte.

    Raises:
        FileNotFoundError: there is no such path.
    """
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}")
    if path.is_file():
        return [path]
    return sorted(
        file for file in path.rglob("*") if file.is_file() and b"\0" not in file.read_bytes()
    )


def tokens(file: Path) -> np.ndarray:
    """A file's bytes and the end-of-document token, [bytes + 1] of uint16."""
    text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
    return np.append(text.astype(np.uint16), np.uint16(END_OF_DOCUMENT))


def write(files: list[Path], prefix: str) -> int:
    """Writes `prefix`.bin and .idx, one document a file; returns the number of tokens."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=DType.optimal_dtype(VOCABULARY))
    total = 0
    for file in files:
        document = tokens(file)
        builder.add_document(document, [len(document)])
        total += len(document)
    builder.finalize(get_idx_path(prefix))
    return total


def main() -> None:
    """Reads the command line, writes the two files and says how to train on them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", required=True, help="path prefix of the .bin and .idx files")
    parser.add_argument(
        "--input",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="text files and folders of them; the Python standard library by default",
    )
    options = parser.parse_args()
    try:
        named = [file for path in options.input or () for file in text_files(path)]
    except OSError as error:
        parser.error(str(error))
    files = named if options.input else standard_library()
    if not files:
        parser.error("no text to write; name files or folders with --input")
    total = write(files, options.output)
    print(f"wrote {len(files)} documents, {total} tokens to {options.output}.bin and .idx")
    print(f"train with: --data-path {options.output} --tokenizer-type NullTokenizer", end=" ")
    print(f"--vocab-size {VOCABULARY}")


if __name__ == "__main__":
    main()

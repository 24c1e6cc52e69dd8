"""Shared by the pictures of dev/: text, the frame, the ticks of an axis, and the file. Needs only Python."""
import sys
from html import escape
from pathlib import Path

LETTER = 6.2  # pixels: the width of a letter, rather too wide


def text(x, y, words, style=""):
  return f'<text x="{x:.1f}" y="{y:.1f}"{style and " " + style}>{escape(words)}</text>'


def tick(longest, most):
  """The distance of an axis' ticks, 1, 2 or 5 times a power of ten: fewer than `most` of them are in `longest`."""
  return next(tick for e in range(-6, 9) for tick in (10 ** e, 2 * 10 ** e, 5 * 10 ** e) if longest / tick < most)


def document(width, height, style, parts):
  return "\n".join([
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
    f"<style>{style}</style>", '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def write(option, path, picture):
  """Ends the program, with exit code 2, if the file can't be written."""
  try:
    Path(path).write_text(picture)
  except OSError as error:
    print(f"error: {option} {path}: {error.strerror}", file=sys.stderr)
    sys.exit(2)

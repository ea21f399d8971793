"""Prints a command of README.rst, so that CI runs what users are told to run: `readme_command.py tests`."""

import pathlib
import re
import sys

readme = pathlib.Path(__file__).parent.parent.joinpath("README.rst").read_text(encoding="utf-8")
found = re.search(
    rf"^\.\. command: {re.escape(sys.argv[1])}\n\n\.\. code-block:: bash\n\n    (.+)\n\n",
    readme,
    re.MULTILINE,
)
if found is None:
    sys.exit(f"README.rst has no command named {sys.argv[1]!r}")
print(found[1])

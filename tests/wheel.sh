#!/usr/bin/env bash
# The wheel, without the checkout: it holds slmgrpo alone and runs the quickstart. Usage: wheel.sh EMPTY_FOLDER
# Its dependencies are borrowed from the active environment by a path file; an editable slmgrpo there is not seen.
set -euo pipefail
folder=$1
mkdir -p "$folder"
pip wheel -q --no-deps --wheel-dir "$folder" .
python - "$folder"/slmgrpo-*.whl <<'PYTHON'
import sys, zipfile

names = zipfile.ZipFile(sys.argv[1]).namelist()
top = {name.split("/")[0] for name in names}
assert all(part == "slmgrpo" or part.endswith(".dist-info") for part in top), top
for needed in ("rewards/base.py", "eval/runner.py", "recipes/quickstart.yaml", "tiny/model/model.safetensors"):
    assert f"slmgrpo/{needed}" in names, needed
print(f"{sys.argv[1]}: {len(names)} files, top level {sorted(top)}")
PYTHON
borrowed=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python -m venv "$folder/venv"
own=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$folder/venv/bin/pip" install -q --no-deps "$folder"/slmgrpo-*.whl
echo "$borrowed" > "$own/borrowed.pth"
cd "$folder"
where=$("$folder/venv/bin/python" -c 'import slmgrpo; print(slmgrpo.__file__)')
case $where in "$own"/*) ;; *) echo "slmgrpo came from $where" >&2; exit 1 ;; esac
"$folder/venv/bin/slmgrpo" train recipes/quickstart.yaml --set train.steps=6

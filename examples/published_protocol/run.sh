#!/usr/bin/env bash
# Corpus, coordinate check, search, verdict and report of plan.toml. Run it again to continue.
#   ./run.sh FILE.bin [--set SECTION.KEY=VALUE ...]    token ids of GPT-2's vocabulary, as nanoGPT or llm.c write them
#   ./run.sh --small  [--set SECTION.KEY=VALUE ...]    the same study in small, on Python's own sources, for two cores
# Everything goes into ./published or ./published-small, or $OUT. The exit code is the verdict's: 0 holds, 3 drifts, 4
# cannot tell.
set -euo pipefail

plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plan.toml
if [ $# -eq 0 ]; then
    sed -n '3,4s/^# *//p' "${BASH_SOURCE[0]}" >&2        # the usage: lines 3 and 4 of this file
    exit 2
fi
source=$1
shift
if [ "$source" = --small ]; then
    out=${OUT:-published-small}
    python=$(command -v python3 || command -v python)
    source=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
    tokenize_options=(--suffix .py --exclude site-packages --exclude dist-packages)
    changes=(
        model.head_dim=16 model.seq_len=64
        proxy.base_width=32 proxy.batch_tokens=512 proxy.num_steps=60 proxy.dtype=float32
        search.parallelism=8 'search.learning_rate=[0.0009765625, 0.125]'
        'transfer.widths=[32, 64, 128]' 'transfer.control_widths=[128]' 'transfer.check_widths=[32, 64, 128]'
        'transfer.offsets_octaves=[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]'
        'transfer.narrow_offsets_octaves=[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0]'
        'transfer.control_offsets_octaves=[-3.0, -2.0, -1.0, 0.0, 1.0]'
        'ladder.widths=[32, 48, 64]' 'ladder.num_steps=[20, 40, 60]'
        target.budget_flops=3.4e14 target.width_multiple=32 cluster.backend=ray
    )
else
    out=${OUT:-published}
    tokenize_options=(--vocab-size 50257)
    changes=()
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
options=(--study "$out/study" --set "data.path=\"$out/corpus\"")
for change in ${changes[@]+"${changes[@]}"}; do options+=(--set "$change"); done
options+=("$@")

if [ ! -e "$out/corpus/manifest.json" ]; then
    forerun tokenize "$source" --out "$out/corpus" "${tokenize_options[@]}"
fi
code=0
forerun check "$plan" "${options[@]}" || code=$?
[ $code -eq 0 ] || [ $code -eq 4 ] || exit $code         # 4: more seeds would be needed to tell
forerun sweep "$plan" "${options[@]}"
code=0
forerun transfer "$plan" "${options[@]}" || code=$?
case $code in 0 | 3 | 4) ;; *) exit $code ;; esac
forerun report "$out/study"
exit $code

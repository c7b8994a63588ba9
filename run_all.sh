#!/usr/bin/env bash
# The whole pipeline for one dataset:   bash run_all.sh DATASET GAMMA [flags for train_imbanid.py]
#
#   bash run_all.sh demo 10                                     the bundled corpus, under 2 minutes on 2 cores
#   SEEDS="0 1 2" bash run_all.sh clinc 10                      the paper's setting: BERT, three seeds, mean and deviation
#   ENCODER=minilm RAW_DIR=~/corpora bash run_all.sh banking 5 --omega 0.3 --tag omega0.3
#
# Environment: SEED (0) or SEEDS, ENCODER (minilm for demo, else bert-base-uncased), NPROC processes for training (1),
# RAW_DIR (empty: download), KNOWN_RATIO (0.75). A stage that is done already is skipped, and says so.
set -euo pipefail
raw=${RAW_DIR:-}
if [ -n "$raw" ]; then raw=$(realpath -m "$raw"); fi
cd "$(dirname "$0")"

if [ $# -lt 2 ] || [ "${2:0:2}" = "--" ]; then
    echo "usage: bash run_all.sh DATASET GAMMA [flags for train_imbanid.py]      DATASET: clinc, banking, stackoverflow or demo" >&2
    exit 2
fi
dataset=$1 gamma=$2
shift 2
seeds=${SEEDS:-${SEED:-0}}
nproc=${NPROC:-1}
if [ "$dataset" = demo ]; then encoder=${ENCODER:-minilm}; else encoder=${ENCODER:-bert-base-uncased}; fi
launch=(python)
if [ "$nproc" != 1 ]; then launch=(torchrun --standalone --nproc_per_node "$nproc"); fi

tag=
for ((i = 1; i <= $#; i++)); do
    case "${!i}" in
        --tag) next=$((i + 1)) && tag=_${!next:-} ;;
        --tag=*) tag=_${!i#--tag=} ;;
        --dataset* | --gamma* | --seed* | --known_ratio* | --labeled_ratio* | --data_dir* | --out_dir*)
            echo "run_all.sh: ${!i} belongs to every stage: pass DATASET GAMMA, SEED or SEEDS, KNOWN_RATIO, or run the scripts one by one" >&2
            exit 2 ;;
    esac
done

folders=()
for seed in $seeds; do
    task=(--dataset "$dataset" --gamma "$gamma" --seed "$seed" --known_ratio "${KNOWN_RATIO:-0.75}")
    # raw corpus -> data/<run>/
    python make_lt_data.py "${task[@]}" --raw_dir "$raw"
    # data/<run>/ -> out/<run>/pretrain.pt
    python pretrain.py "${task[@]}" --encoder "$encoder"
    # data/<run>/ and out/<run>/pretrain.pt -> out/<run>/results.json and what belongs to it
    "${launch[@]}" train_imbanid.py "${task[@]}" "$@"
    run=$(python -c "import make_lt_data as m; print(m.run_name('$dataset', float('$gamma'), $seed, float('${KNOWN_RATIO:-0.75}')))")
    folders+=("out/$run$tag")
done
# out/<run>/results.json of every seed -> mean and standard deviation on screen
python figures.py mean "${folders[@]}"

#!/usr/bin/env bash
# The whole pipeline, for a benchmark or for a table of your own:
#
#   bash run_all.sh DATASET GAMMA [flags of train_imbanid.py, or of pretrain.py alone]
#   bash run_all.sh DATASET GAMMA --method METHOD [its flags]   a compared method, see baselines/
#   bash run_all.sh TABLE [flags]                               a .csv, .tsv or .jsonl file, see README
#
#   bash run_all.sh demo 10                                     the bundled corpus, about 2 minutes on 2 cores
#   SEEDS="0 1 2" bash run_all.sh clinc 10                      the paper's setting: BERT, three seeds, mean and deviation
#   ENCODER=minilm RAW_DIR=~/corpora bash run_all.sh banking 5 --omega 0.3 --tag omega0.3
#   ENCODER=minilm bash run_all.sh clinc 10 --method usnid
#   bash run_all.sh my_utterances.csv --text_column message --label_column intent --num_classes 40
#
# Environment: SEED (0) or SEEDS, ENCODER (minilm for demo and tables, else bert-base-uncased), NPROC processes for
# either stage (1), RAW_DIR (empty: download), KNOWN_RATIO (0.75). A stage that is done already is skipped, and says so.
set -euo pipefail
raw=${RAW_DIR:-}
if [ -n "$raw" ]; then raw=$(realpath -m -- "$raw"); fi
if [ -d "${ENCODER:-}" ] && [ ! "$ENCODER" = minilm ] && [ ! . -ef "$(dirname "$0")" ]; then ENCODER=$(realpath -- "$ENCODER"); fi
usage() {
    echo "usage: bash run_all.sh DATASET GAMMA [flags for train_imbanid.py]      DATASET: clinc, banking, stackoverflow or demo" >&2
    echo "       bash run_all.sh TABLE [flags]                                   TABLE: a .csv, .tsv or .jsonl file" >&2
    exit 2
}
if [ $# -lt 1 ]; then usage; fi
case "$1" in -h | --help) sed -n '2,/^set /s/^# \?//p' "$0"; exit 0 ;; esac  # what stands above
dataset=$1 gamma=10 own=
case "${dataset,,}" in *.csv | *.tsv | *.jsonl | *.json) own=yes dataset=$(realpath -ms -- "$dataset") ;; esac
shift
if [[ -z "$own" && "$dataset" =~ \.[A-Za-z]+$ ]]; then
    echo "run_all.sh: $dataset is no .csv, .tsv or .jsonl: save it as CSV in UTF-8, with the columns' names in its first line" >&2
    exit 2
elif [ -z "$own" ]; then
    if [ $# -lt 1 ] || [ "${1:0:2}" = "--" ]; then usage; fi
    gamma=$1
    shift
elif [ $# -gt 0 ] && [ "${1:0:1}" != - ]; then
    echo "run_all.sh: $1: a table is taken as it is and has no GAMMA: give flags alone behind it" >&2
    exit 2
elif [ -n "${KNOWN_RATIO:-}" ]; then
    echo "run_all.sh: KNOWN_RATIO is for benchmarks: what of a table is known, its labels say" >&2
    exit 2
fi
here=$PWD
cd "$(dirname "$0")"
seeds=${SEEDS:-${SEED:-0}}
if ! [[ $seeds =~ ^[[:space:]]*([0-9]+([[:space:]]+|$))+$ ]] || [ -n "$(printf '%s\n' $seeds | sed 's/^0*\(.\)/\1/' | sort | uniq -d)" ]; then
    echo "run_all.sh: SEEDS='$seeds' must be numbers, each once, such as SEEDS='0 1 2'" >&2
    exit 2
fi
nproc=${NPROC:-1}
case "$nproc" in *[!0-9]* | 0*) echo "run_all.sh: NPROC=$nproc must be a number of processes, 1 or more" >&2 && exit 2 ;; esac
if [ "$dataset" = demo ] || [ -n "$own" ]; then encoder=${ENCODER:-minilm}; else encoder=${ENCODER:-bert-base-uncased}; fi
launch=(python)
if [ "$nproc" != 1 ]; then
    launch=(torchrun --standalone --nproc_per_node "$nproc")
    threads=$(($(getconf _NPROCESSORS_ONLN) / nproc))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 1 ? threads : 1))}  # torchrun's own default is 1, and it says so at length
fi

# Flags that only another stage has go there, three go to both trainings, all others to train_imbanid.py.
help= tag= method=imbanid make=() name=() pre=() both=() train=()
while [ $# -gt 0 ]; do
    value=("${@:2:1}")
    case "$1" in
        --text_column | --label_column | --dev_ratio) make+=("$1" "${value[@]}") && shift ;;
        --text_column=* | --label_column=* | --dev_ratio=*) make+=("$1") ;;
        --name_command) name=("$1=${value[0]:-}") && shift ;;
        --name_command=*) name=("$1") ;;
        --method) method=${value[0]:-} && shift ;;
        --method=*) method=${1#--method=} ;;
        -h | --help) help=yes ;;
        --labeled_batch_size | --mask_epochs | --max_length | --patience | --select | --trained_layers) pre+=("$1" "${value[@]}") && shift ;;
        --labeled_batch_size=* | --mask_epochs=* | --max_length=* | --patience=* | --select=* | --trained_layers=* | --no_mlm) pre+=("$1") ;;
        --device | --cache_gb) both+=("$1" "${value[@]}") && shift ;;
        --device=* | --cache_gb=* | --restart) both+=("$1") ;;
        --tag) tag=${value[0]:+_${value[0]}} train+=("$1" "${value[@]}") && shift ;;
        --tag=*) tag=${1#--tag=} tag=${tag:+_$tag} train+=("$1") ;;
        --dataset* | --gamma* | --seed* | --known_ratio* | --labeled_ratio* | --data_dir* | --out_dir*)
            echo "run_all.sh: $1 belongs to every stage: pass DATASET GAMMA, SEED or SEEDS, KNOWN_RATIO, or run the scripts one by one" >&2
            exit 2 ;;
        --encoder | --encoder=*)
            echo "run_all.sh: $1 belongs to several stages: pass ENCODER=NAME, in front of bash" >&2
            exit 2 ;;
        *) train+=("$1") ;;
    esac
    if [ $# -gt 0 ]; then shift; fi
done

case "${name[*]}" in --name_command= | --name_command=--*)
    echo "run_all.sh: --name_command needs a program that prints a name" >&2
    exit 2 ;;
esac
if [ -z "$own" ] && [ ${#name[@]} -gt 0 ]; then
    echo "run_all.sh: --name_command is for a table; a benchmark's clusters are named by predict.py out/RUN --name_command PROGRAM" >&2
    exit 2
fi
program=${name[0]:-} program=${program#*=} program=${program%% *}
if ! [[ $program =~ ^[A-Za-z0-9_./-]+$ ]] || (cd "$here" && command -v -- "$program" > /dev/null); then
    program=  # it is there, or the shell's to find
fi
if [ ${#name[@]} -gt 0 ] && [ ! . -ef "$here" ]; then  # a program may be given as seen from where it was asked for
    q=\'  # quoted as any shell reads it; bash's own %q is not
    name=("--name_command=cd '${here//$q/$q\\$q$q}' && ${name[0]#*=}")
fi
stage=(train_imbanid.py) module=train_imbanid
if [ "$method" != imbanid ]; then
    if [ -n "$own" ] || [ ! -f "baselines/$method.py" ] || [ "$method" = shared ]; then
        echo "run_all.sh: --method $method: on a benchmark choose imbanid, $(cd baselines && ls *.py | grep -v shared | sed s/.py// | paste -sd , | sed 's/,/, /g')" >&2
        exit 2
    fi
    if [ "$nproc" != 1 ]; then echo "run_all.sh: the compared methods run on one process: leave NPROC out" >&2 && exit 2; fi
    stage=(-m "baselines.$method" --encoder "$encoder") module=baselines.$method
    tag=_$method$tag
    train+=("${pre[@]}") pre=()  # it runs its own pre-training, if it needs one
fi
pre+=("${both[@]}") train=("${both[@]}" "${train[@]}")

# Refuses a wrong flag now instead of after the pre-training, and a number of classes that does not fit once the data are there.
check='
import importlib, sys
from make_lt_data import open_run, parse_args, run_script
stage, data = importlib.import_module(sys.argv[1]), sys.argv[2]
sys.argv[:3] = [sys.argv[1].split(".")[-1] + ".py"]
def check(words):
    args = parse_args(stage.Args, words)
    if hasattr(stage, "check_flags"):  # a compared method checks its own when it runs
        stage.check_flags(args)
    if data:
        stage.wanted_classes(args, open_run(args)[-1])
run_script(check)'
if [ -n "$help" ]; then python -c "$check" "$module" "" --help; exit 0; fi
if [ ${#train[@]} -gt 0 ]; then python -c "$check" "$module" "" --dataset "$dataset" "${train[@]}" >&2; fi

if [ ! . -ef "$here" ]; then echo "run_all.sh: data/ and out/ are those in $PWD" >&2; fi
folders=()
for seed in $seeds; do
    task=(--dataset "$dataset" --gamma "$gamma" --seed "$seed" --known_ratio "${KNOWN_RATIO:-0.75}")
    # raw corpus or table -> data/<run>/
    python make_lt_data.py "${task[@]}" --raw_dir "$raw" "${make[@]}"
    case "$method ${train[*]}" in "imbanid "*--num_classes*) python -c "$check" "$module" data "${task[@]}" "${train[@]}" >&2 ;; esac
    run=$(python -c 'import os, sys, make_lt_data as m
d, g, s, k = sys.argv[1:]
sys.stdout.buffer.write(os.fsencode(m.run_name(d, float(g), int(s), float(k))))' \
        "$dataset" "$gamma" "$seed" "${KNOWN_RATIO:-0.75}")
    if [ -n "$program" ] && [ ! -e "out/$run$tag/clusters.csv" ]; then
        echo "run_all.sh: --name_command $program is not there or cannot be run" >&2
        exit 2
    fi
    # data/<run>/ -> out/<run>/pretrain.pt
    if [ "$nproc" != 1 ]; then  # the last word, below torchrun's traceback
        trap 'echo "run_all.sh: stopped; the same command goes on from what is saved" >&2; exit 2' INT
    fi
    if [ "$method" = imbanid ]; then "${launch[@]}" pretrain.py "${task[@]}" --encoder "$encoder" "${pre[@]}"; fi
    # data/<run>/ and out/<run>/pretrain.pt -> out/<run>/results.json and what belongs to it
    "${launch[@]}" "${stage[@]}" "${task[@]}" "${train[@]}"
    trap - INT
    folders+=("out/$run$tag")
    if [ -n "$own" ]; then
        # out/<run>/ -> clusters.csv, assignments.csv, then the figures and report.html
        ask=("${name[@]}")
        if [ -e "out/$run$tag/clusters.csv" ] && [ ${#ask[@]} -gt 0 ]; then  # the names may be the user's by now
            echo "out/$run$tag/clusters.csv is there already: --name_command not asked (predict.py asks anew)"
            ask=()
        fi
        python predict.py "out/$run$tag" "${ask[@]}" < /dev/null
        python figures.py "out/$run$tag"
    fi
done
# out/<run>/results.json of every seed -> mean and standard deviation on screen
if [ -z "$own" ]; then python figures.py mean "${folders[@]}"; fi

#!/bin/sh
# The last lines of make train: possible next steps for a reader. The options are those of the recipe (Makefile).
#
#   dev/make/next_steps.sh OPTIONS        OPTIONS: the recipe's options for --generate, --seq-len N [--dtype TYPE]
cat <<LINES

more like this   ./train_gpt --generate --resume runs/cpp $* --samples 3 --prompt 'class '
your own text    ./train_gpt --train 'my/*.txt' --model d6 --train-minutes 10 --sample-seconds 30 --prompt 'The ' --out runs/mine
a larger model   ./train_gpt --plan --mesh auto --cluster 8xh100 --model gpt2-xl --global-batch 512   # time and cost; then docs/rent.md
see it live      python3 dev/dashboard.py runs   # during a run: http://127.0.0.1:8642/
how it works     docs/teach.md
LINES

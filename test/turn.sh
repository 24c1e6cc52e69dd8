#!/usr/bin/env bash
# Prints the number by which what takes turns is chosen: it grows with each commit, and without git each day. GPT_COMMITS: this one
if [ -n "${GPT_COMMITS:-}" ]; then echo "$GPT_COMMITS"; exit; fi
git rev-list --count HEAD 2>/dev/null || date +%-j

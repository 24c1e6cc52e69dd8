#!/usr/bin/env bash
# Prints the number by which what takes turns is chosen: it grows with each commit, and without git each day.
git rev-list --count HEAD 2>/dev/null || date +%-j

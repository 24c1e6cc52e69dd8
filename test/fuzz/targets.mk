# Builds what run.sh runs, for which it gives CLANG: the readers of files once, with the sanitizers, and the targets.
BUILD := build/fuzz
READERS := bill checkpoint data error files guard manifest metrics model_config safetensors tensor_files text tokenizer
SANITIZERS := address,undefined,float-cast-overflow
OPTIMIZE := -O1
FLAGS := -std=c++20 $(OPTIMIZE) -gline-tables-only -fno-omit-frame-pointer -Wall -Wextra -fno-sanitize-recover=all -I.
vpath %.cpp gpt gpt/base extensions/generation runtime/checkpoints runtime/guard runtime/reports test/fuzz
.SECONDARY:

$(BUILD)/fuzz_%: $(BUILD)/fuzz_%.o $(BUILD)/readers.a
	$(CLANG) -fsanitize=fuzzer,$(SANITIZERS) -o $@ $^ -lxxhash
$(BUILD)/readers.a: $(READERS:%=$(BUILD)/%.o) test/fuzz/targets.mk  # which names them
	@rm -f $@; ar rcs $@ $(filter %.o,$^)
$(BUILD)/%.o: %.cpp
	$(CLANG) $(FLAGS) -fsanitize=fuzzer-no-link,$(SANITIZERS) -MMD -MP -c -o $@ $<
-include $(wildcard $(BUILD)/*.d)

#include "extensions/generation/options.h"
#include "extensions/generation/tokenizer.h"
#include "gpt/room_options.h"

Room generation_room = {
    .name = "generation",
    .add_options = [](CLI::App& app, Options& o) {
      TextOptions& text = o.of<TextOptions>();
      app.add_flag("--generate", text.generates, "write a sample from a checkpoint (--resume or --init) and stop")
          ->each([&o](const std::string&) { o.generate = true; });
      add(app, "--sample-every", o.sample_every, any_count, "steps between samples; 0: none");
      add(app, "--sample-seconds", o.sample_seconds, in_range(0., 1e7),
          "seconds between the end of a sample and the next; 0: none");
      add(app, "--sample-len", text.length, any_count, "tokens per sample");
      app.add_option("--prompt", text.prompt, "text that a sample continues")->type_name("TEXT");
      add(app, "--temperature", text.draw.temperature, in_range(0., 100.), "temperature of sampling: below 1 sharper, 0 always the likeliest token");
      add(app, "--samples", o.samples, in_range(1, most_micro_batch), "texts that --generate draws, all at the same time");
      app.add_flag("--no-cache", o.no_cache, "compute all tokens again for each new one: slow, to compare with");
      add(app, "--top-p", text.draw.top_p, in_range(1e-6, 1.),
          "sample only from the likeliest tokens that have this probability together; 1: all");
      add(app, "--top-k", text.draw.top_k, in_range(0, ModelShape::most_vocabulary), "sample only from the k likeliest tokens; 0: all");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.generate, {"--moments", "--offload", "--delay", "--compress", "--compress-weights"}, "beside --generate: it is for training; leave it out");
      refuse(!o.generate, {"--samples"}, "needs --generate: training writes one sample at a time");
      refuse(!o.generate && !o.samples_in_training(), {"--no-cache"},
             "needs --generate, --sample-every or --sample-seconds: nothing else has a cache");
    },
    .check_model = [](const std::filesystem::path& folder, const Options& o, bool of_text) {
      if (of_text) check_tokens_are_bytes(folder, o.shape.vocabulary);
    },
};

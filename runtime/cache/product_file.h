// The choices of matrix products that this user's runs have timed (kernels/gemm/gemm_choices.cuh), in a file of
// --products for the next starts, which then time nothing, and have the same bits. Names begin with the card, the
// library's version and the size of its workspace, so one file serves all machines. After a heading it has a line for
// each choice:
//
//   CHECKSUM NAME<tab>CHOICE      XXH3 of the text behind the space
//
// A line with another checksum is damaged. It is ignored, and left out when the file is written the next time. Jobs
// that add at the same time take turns; of two choices for a name the first one stays.
#pragma once

#include <string>
#include <utility>

#include "gpt/kept_choices.h"

// $XDG_CACHE_HOME/gpt.cu/products, or else $HOME/.cache/gpt.cu/products; empty: neither is set.
std::string user_products();

// The choices in the content of such a file.
ProductChoices choices_in(const std::string& content);

// file: of --products; none: nothing is timed
class ProductFile final : public KeptChoices {
 public:
  explicit ProductFile(std::string file) : file_(std::move(file)) {}

  bool by_time() const override { return file_ != "none"; }
  // None if the file can't be read.
  ProductChoices read() const override;
  // Adds choices that were timed to the file. Never fails; returns one line that says whether they were kept.
  std::string keep(const ProductChoices& timed) const override;

 private:
  const std::string file_;
};

// The base of classes whose objects are not copied, as each must give back once what it has taken.
#pragma once

struct NotCopied {
  NotCopied() = default;
  NotCopied(const NotCopied&) = delete;
  NotCopied& operator=(const NotCopied&) = delete;
};

// Counts checks and faults of a test program by section, for a Python test to read: one line
// "section checks faults" each on standard output, the first few faults in words on standard error.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

class Section {
 public:
  explicit Section(const char* name) : name_(name) {}
  Section(const Section&) = delete;
  Section& operator=(const Section&) = delete;
  ~Section() {
    std::printf("%s %lld %lld\n", name_, static_cast<long long>(checks_),
                static_cast<long long>(faults_));
  }

  // Says in words what is wrong where `holds` is false; false again.
  __attribute__((format(printf, 3, 4))) bool check(bool holds, const char* format, ...) {
    ++checks_;
    if (holds) return true;
    if (++faults_ > 5) return false;
    std::fprintf(stderr, "%s: ", name_);
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    return false;
  }

 private:
  const char* name_;
  int64_t checks_ = 0, faults_ = 0;
};

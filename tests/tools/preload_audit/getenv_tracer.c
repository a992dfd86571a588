/* Loaded before the C library: records the names of the variables that getenv is called for. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NAMES = 4096 };
static char *names[MAX_NAMES];
static int count;

__attribute__((constructor)) static void hide_from_children(void) { unsetenv("LD_PRELOAD"); }

static void record(const char *name) {
  for (int i = 0; i < count; i++)
    if (strcmp(names[i], name) == 0) return;
  if (count < MAX_NAMES) names[count++] = strdup(name);
}

char *getenv(const char *name) {
  static char *(*real)(const char *);
  if (!real) real = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
  record(name);
  return real(name);
}

char *secure_getenv(const char *name) {
  static char *(*real)(const char *);
  if (!real) real = (char *(*)(const char *))dlsym(RTLD_NEXT, "secure_getenv");
  record(name);
  return real(name);
}

const char *take_read(void) { return count ? names[--count] : NULL; }

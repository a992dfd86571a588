/* Loaded before the C library: keeps the names of the variables that native code asks for, until they are taken. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM = 4096 };
static char *names[ROOM];
static int count;

__attribute__((constructor)) static void hide(void) { unsetenv("LD_PRELOAD"); }

static void keep(const char *name) {
  for (int i = 0; i < count; i++)
    if (strcmp(names[i], name) == 0) return;
  if (count < ROOM) names[count++] = strdup(name);
}

char *getenv(const char *name) {
  static char *(*real)(const char *);
  if (!real) real = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
  keep(name);
  return real(name);
}

char *secure_getenv(const char *name) {
  static char *(*real)(const char *);
  if (!real) real = (char *(*)(const char *))dlsym(RTLD_NEXT, "secure_getenv");
  keep(name);
  return real(name);
}

const char *take_asked(void) { return count ? names[--count] : NULL; }

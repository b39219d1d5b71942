/* NVML as a GB10 answers it: most of it is not supported. What it says stands in the file that
 * GB10_STATE names, a line each: "clock_mhz 2405", "process 1234", ... A process that has ended is
 * not on the GPU. Built by machine.py; found by pynvml as libnvidia-ml.so.1. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7 };

typedef struct {
  unsigned pid;
  unsigned long long memory;
  unsigned instance, compute;
} Process;

static FILE *opened(void) {
  const char *path = getenv("GB10_STATE");
  return path ? fopen(path, "r") : NULL;
}

static long said(const char *wanted, long otherwise) {
  char name[64];
  long value, found = otherwise;
  FILE *file = opened();
  if (!file) return otherwise;
  while (fscanf(file, "%63s %ld", name, &value) == 2)
    if (!strcmp(name, wanted)) found = value;
  fclose(file);
  return found;
}

static int text(char *buffer, unsigned size, const char *what) {
  snprintf(buffer, size, "%s", what);
  return SUCCESS;
}

static int number(unsigned *answer, const char *name) {
  long value = said(name, -1);
  if (value < 0) return NOT_SUPPORTED;
  *answer = (unsigned)value;
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { return flags ? INVALID : SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Unknown Error"; }
int nvmlSystemGetDriverVersion(char *buffer, unsigned size) { return text(buffer, size, "580.95.05"); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  *device = (void *)1;
  return index ? INVALID : SUCCESS;
}
int nvmlDeviceGetName(void *device, char *buffer, unsigned size) { return text(buffer, size, "NVIDIA GB10"); }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = 12, *minor = 1;
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, void *memory) { return NOT_SUPPORTED; }
int nvmlDeviceGetMemoryInfo_v2(void *device, void *memory) { return NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *clock) {
  return kind == 1 ? number(clock, "clock_mhz") : NOT_SUPPORTED; /* NVML_CLOCK_SM */
}
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *clock) {
  *clock = 3003;
  return kind == 1 ? SUCCESS : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatt) { return number(milliwatt, "power_mw"); }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { return number(celsius, "celsius"); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
  *reasons = (unsigned long long)said("throttle_reasons", 0);
  return SUCCESS;
}
int nvmlDeviceGetPersistenceMode(void *device, unsigned *on) { *on = 1; return SUCCESS; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, Process *found) {
  *count = 0;
  return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *found) {
  char name[64];
  long value;
  unsigned room = found ? *count : 0, seen = 0;
  FILE *file = opened();
  while (file && fscanf(file, "%63s %ld", name, &value) == 2) {
    if (strcmp(name, "process") || kill((int)value, 0)) continue;
    if (seen < room) found[seen] = (Process){(unsigned)value, ~0ULL, ~0U, ~0U};
    seen++;
  }
  if (file) fclose(file);
  *count = seen;
  return seen > room ? INSUFFICIENT_SIZE : SUCCESS;
}

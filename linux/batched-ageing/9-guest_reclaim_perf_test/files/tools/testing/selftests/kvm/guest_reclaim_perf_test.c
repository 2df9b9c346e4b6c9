// SPDX-License-Identifier: GPL-2.0-only
/*
 * A guest that writes to all of its memory, of which the host gives it only a part; or another
 * program, such as max_guest_memory_test, which gets only a part of what it uses.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define MEMORY_GPA	0x80000000ul
#define MEMORY_SLOT	1
#define LOCKLESS	"/sys/module/kvm/parameters/lockless_aging"
#define GROUPS		"/tmp/slat-groups"
#define GROUP		GROUPS "/guest"

static const struct mode {
	const char *name, *lockless, *components;
} modes[] = {
	{ "lock", "N", "0x0007" },
	{ "lockless", "Y", "0x0007" },
	{ "batched", "Y", "0x000f" },
};

static void guest_code(unsigned long pages, unsigned long page_size)
{
	unsigned long page;

	for (;;) {
		for (page = 0; page < pages; page++)
			*(volatile unsigned long *)(MEMORY_GPA + page * page_size) = page;
		GUEST_SYNC(0);
	}
}

static void use_all(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	TEST_ASSERT(get_ucall(vcpu, &uc) == UCALL_SYNC, "The guest left for another reason: %s",
		    exit_reason_str(vcpu->run->exit_reason));
}

static void set(const char *path, const char *text)
{
	int file = open_path_or_exit(path, O_WRONLY);

	TEST_ASSERT(write(file, text, strlen(text)) == (ssize_t)strlen(text),
		    "Cannot write %s to %s", text, path);
	close(file);
}

/* Makes swap of a block device: its first page is a header (include/linux/swap.h). */
static void swap_on(const char *device)
{
	size_t page_size = getpagesize();
	unsigned char *header = calloc(1, page_size);
	int file = open_path_or_exit(device, O_RDWR);
	off_t bytes = lseek(file, 0, SEEK_END);
	unsigned int version = 1, last = bytes / page_size - 1;

	memcpy(header + 1024, &version, 4);
	memcpy(header + 1028, &last, 4);
	memcpy(header + page_size - 10, "SWAPSPACE2", 10);
	TEST_ASSERT(pwrite(file, header, page_size, 0) == (ssize_t)page_size && !fsync(file),
		    "Cannot write to %s", device);
	close(file);
	free(header);
	TEST_ASSERT(!swapon(device, 0), "Cannot swap to %s", device);
}

static void join_group(const char *bytes)
{
	mkdir(GROUPS, 0700);
	TEST_ASSERT(!mount("none", GROUPS, "cgroup2", 0, NULL), "Cannot mount control groups");
	set(GROUPS "/cgroup.subtree_control", "+memory");
	TEST_ASSERT(!mkdir(GROUP, 0700), "Cannot make a control group");
	set(GROUP "/memory.max", bytes);
	set(GROUP "/cgroup.procs", "0");
}

static unsigned long stat_of(const char *name)
{
	FILE *text = fopen(GROUP "/memory.stat", "r");
	unsigned long value, found = 0;
	char line[64];

	while (text && fscanf(text, "%63s %lu", line, &value) == 2)
		if (!strcmp(line, name))
			found = value;
	if (text)
		fclose(text);
	return found;
}

static void run_program(char **words)
{
	int status;
	pid_t child = fork();

	if (!child) {
		execv(words[0], words);
		_exit(127);
	}
	TEST_ASSERT(child > 0 && waitpid(child, &status, 0) == child, "Cannot run %s", words[0]);
	TEST_ASSERT(WIFEXITED(status) && !WEXITSTATUS(status), "%s: status %x", words[0], status);
}

static void run_guest(struct kvm_vcpu *vcpu, char **words)
{
	if (words)
		run_program(words);
	else
		use_all(vcpu);
}

int main(int argc, char **argv)
{
	const char *limit = "40M", *device = "/dev/ram0";
	unsigned long bytes = 64ul << 20, page_size = getpagesize(), pages;
	const struct mode *mode = NULL;
	struct kvm_vcpu *vcpu = NULL;
	struct kvm_vm *vm = NULL;
	char **words;
	int opt, round;
	size_t i;

	while ((opt = getopt(argc, argv, "+b:d:hl:m:")) != -1) {
		switch (opt) {
		case 'b':
			bytes = parse_size(optarg);
			break;
		case 'd':
			device = optarg;
			break;
		case 'l':
			limit = optarg;
			break;
		case 'm':
			for (i = 0; i < ARRAY_SIZE(modes); i++) {
				if (!strcmp(optarg, modes[i].name))
					mode = &modes[i];
			}
			TEST_ASSERT(mode, "-m takes lock, lockless, batched");
			break;
		default:
			printf("usage: %s [-b bytes] [-l limit] [-d swap device] [-m lock|lockless|batched] [PROGRAM ...]\n",
			       argv[0]);
			exit(opt != 'h');
		}
	}
	__TEST_REQUIRE(!access(device, W_OK), "There is no %s to swap to", device);
	swap_on(device);
	join_group(limit);
	pages = bytes / page_size;
	words = optind < argc ? argv + optind : NULL;

	for (i = 0; i < ARRAY_SIZE(modes); i++) {
		if (mode && mode != &modes[i])
			continue;
		/* A kernel without the switch takes the lock. */
		if (!access(LOCKLESS, F_OK))
			set(LOCKLESS, modes[i].lockless);
		else if (i)
			break;
		set("/sys/kernel/mm/lru_gen/enabled", modes[i].components);

		if (!words) {
			vm = __vm_create_with_one_vcpu(&vcpu, pages, guest_code);
			vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS, MEMORY_GPA,
						    MEMORY_SLOT, pages, 0);
			virt_map(vm, MEMORY_GPA, MEMORY_GPA, pages);
			vcpu_args_set(vcpu, 2, pages, page_size);
		}
		/* Another program begins again each time. */
		for (round = 1; round <= (words ? 1 : 2); round++) {
			unsigned long scanned = stat_of("pgscan"), stolen = stat_of("pgsteal");
			unsigned long faulted = stat_of("pgmajfault");
			struct timespec start, took;

			clock_gettime(CLOCK_MONOTONIC, &start);
			run_guest(vcpu, words);
			took = timespec_elapsed(start);
			printf("%-8s run %d: %ld ns, %lu pages scanned, %lu reclaimed, %lu read back\n",
			       modes[i].name, round, took.tv_sec * 1000000000l + took.tv_nsec,
			       stat_of("pgscan") - scanned, stat_of("pgsteal") - stolen,
			       stat_of("pgmajfault") - faulted);
		}
		if (vm)
			kvm_vm_free(vm);
	}
	return 0;
}

// SPDX-License-Identifier: GPL-2.0-only
/*
 * The time that the multi-generational LRU takes to scan a guest's memory.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define MEMORY_GPA	0x80000000ul
#define MEMORY_SLOT	1
#define LOCKLESS	"/sys/module/kvm/parameters/lockless_aging"
#define LRU_GEN		"/sys/kernel/debug/lru_gen"

static const struct mode {
	const char *name, *lockless, *components;
	bool alone;	/* The process uses as much memory itself; no secondary MMU is asked. */
} modes[] = {
	{ "lock", "N", "0x0007" },
	{ "lockless", "Y", "0x0007" },
	{ "batched", "Y", "0x000f" },
	{ "none", "Y", "0x0007", true },
};

static void guest_code(unsigned long pages, unsigned long page_size)
{
	unsigned long page;

	for (;;) {
		for (page = 0; page < pages; page++)
			*(volatile unsigned long *)(MEMORY_GPA + page * page_size) += 1;
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

/* The guest of -f, which another thread unmaps and uses until it is told to stop. */
static struct faulting {
	struct kvm_vcpu *vcpu;
	void *memory;
	unsigned long bytes, rounds;
	bool stop;
} faulting;

static void *fault(void *unused)
{
	while (!__atomic_load_n(&faulting.stop, __ATOMIC_RELAXED)) {
		TEST_ASSERT(!madvise(faulting.memory, faulting.bytes, MADV_DONTNEED),
			    "Cannot unmap");
		use_all(faulting.vcpu);
		__atomic_add_fetch(&faulting.rounds, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

static void set(const char *path, const char *text)
{
	int file = open_path_or_exit(path, O_WRONLY);

	TEST_ASSERT(write(file, text, strlen(text)) == (ssize_t)strlen(text),
		    "Cannot write %s to %s", text, path);
	close(file);
}

/*
 * The newest generation of the root's memory cgroup on node 0, and the anonymous pages of the one
 * before it: those that were young when a scan began the newest.
 */
static unsigned long newest(unsigned int *group, unsigned long *pages)
{
	unsigned long found = 0, generation, anon, file, last = 0;
	FILE *text = fopen(LRU_GEN, "r");
	char line[256];
	int age, groups = 0;

	TEST_ASSERT(text, "Cannot read " LRU_GEN);
	while (fgets(line, sizeof(line), text)) {
		unsigned int number;

		if (sscanf(line, "memcg %u", &number) == 1) {
			if (groups++)
				break;
			*group = number;
		} else if (sscanf(line, "%lu %d %lu %lu", &generation, &age, &anon, &file) == 4) {
			found = generation;
			*pages = last;
			last = anon;
		}
	}
	fclose(text);
	TEST_ASSERT(found, LRU_GEN " has no generation");
	return found;
}

static unsigned long fault_rounds(void)
{
	return __atomic_load_n(&faulting.rounds, __ATOMIC_RELAXED);
}

int main(int argc, char **argv)
{
	unsigned long bytes = 64ul << 20, page_size = getpagesize(), pages, young = 0, first;
	const struct mode *mode = NULL;
	unsigned int rounds = 4, round, group = 0;
	bool faults = false;
	void *memory = NULL;
	struct kvm_vcpu *vcpu;
	pthread_t thread;
	struct kvm_vm *vm;
	size_t i;
	int opt;

	while ((opt = getopt(argc, argv, "b:fhi:m:")) != -1) {
		switch (opt) {
		case 'b':
			bytes = parse_size(optarg);
			break;
		case 'f':
			faults = true;
			break;
		case 'i':
			rounds = atoi_positive("Number of scans", optarg);
			break;
		case 'm':
			for (i = 0; i < ARRAY_SIZE(modes); i++) {
				if (!strcmp(optarg, modes[i].name))
					mode = &modes[i];
			}
			TEST_ASSERT(mode, "-m takes lock, lockless, batched, none");
			break;
		default:
			printf("usage: %s [-b bytes] [-f] [-i scans] [-m lock|lockless|batched|none]\n",
			       argv[0]);
			exit(opt != 'h');
		}
	}
	__TEST_REQUIRE(!access(LRU_GEN, W_OK), "This kernel has no lru_gen in debugfs");
	pages = bytes / page_size;

	vm = __vm_create_with_one_vcpu(&vcpu, pages, guest_code);
	__TEST_REQUIRE(vm->page_size == page_size, "The guest's pages are not the host's");
	vm_userspace_mem_region_add(vm, VM_MEM_SRC_ANONYMOUS, MEMORY_GPA, MEMORY_SLOT, pages, 0);
	virt_map(vm, MEMORY_GPA, MEMORY_GPA, pages);
	vcpu_args_set(vcpu, 2, pages, page_size);
	memset(addr_gpa2hva(vm, MEMORY_GPA), 1, bytes);
	use_all(vcpu);
	if (faults) {
		faulting.vcpu = vcpu;
		faulting.memory = addr_gpa2hva(vm, MEMORY_GPA);
		faulting.bytes = bytes;
		pthread_create(&thread, NULL, fault, NULL);
	}

	for (i = 0; i < ARRAY_SIZE(modes); i++) {
		if ((mode && mode != &modes[i]) || (faults && modes[i].alone))
			continue;
		/* A kernel without the switch takes the lock. */
		if (!access(LOCKLESS, F_OK))
			set(LOCKLESS, modes[i].lockless);
		else if (i && !modes[i].alone)
			continue;
		if (modes[i].alone) {
			kvm_vm_free(vm);
			vm = NULL;
			memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			TEST_ASSERT(memory != MAP_FAILED, "Cannot map memory");
			/* Pages as small as the guest's; a kernel without huge ones has no such call. */
			madvise(memory, bytes, MADV_NOHUGEPAGE);
		}
		set("/sys/kernel/mm/lru_gen/enabled", modes[i].components);
		first = fault_rounds();
		for (round = 0; faults ? fault_rounds() < first + rounds : round < rounds; round++) {
			unsigned long generation = newest(&group, &young);
			struct timespec start, took;
			char command[80];

			if (memory)
				memset(memory, round + 1, bytes);
			else if (!faults)
				use_all(vcpu);
			snprintf(command, sizeof(command), "+ %u 0 %lu 1 1", group, generation);
			clock_gettime(CLOCK_MONOTONIC, &start);
			set(LRU_GEN, command);
			took = timespec_elapsed(start);
			newest(&group, &young);
			if (faults)
				continue;
			printf("%-8s scan %u: %ld ns, %lu anonymous pages young, %lu used\n",
			       modes[i].name, round, took.tv_sec * 1000000000l + took.tv_nsec,
			       young, pages);
		}
		if (faults)
			printf("%-8s %lu pages faulted in beside %u scans\n", modes[i].name,
			       rounds * pages, round);
	}
	if (faults) {
		__atomic_store_n(&faulting.stop, true, __ATOMIC_RELAXED);
		pthread_join(thread, NULL);
	}
	if (vm)
		kvm_vm_free(vm);
	return 0;
}

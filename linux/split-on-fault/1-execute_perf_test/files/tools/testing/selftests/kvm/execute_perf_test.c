// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measure how long vCPUs take to execute from memory that is already mapped.
 *
 * First, the vCPUs write a return instruction to the start of each guest page,
 * so that KVM maps the memory writable, with huge pages if possible. Then they
 * call all of these instructions. If KVM maps huge pages without execute
 * permission (x86 with nx_huge_pages), it has to map each executed page with a
 * small page. Finally, the vCPUs read all pages, optionally after the NX
 * recovery worker had time to recover huge pages.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvm_util.h"
#include "test_util.h"
#include "memstress.h"
#include "guest_modes.h"
#include "processor.h"
#include "ucall_common.h"

enum phase { WRITE_RETURNS, EXECUTE, READ, NR_PHASES };

static const char * const phase_names[NR_PHASES] = {
	"Populating memory",
	"Executing from memory",
	"Reading memory",
};

/* The current phase. Written by the host while no vCPU runs. */
static enum phase phase;

struct test_params {
	size_t vcpu_bytes;
	int nr_vcpus;
	int slots;
	int recovery_ms;
	bool partition;
	enum vm_mem_backing_src_type backing_src;
};

#if defined(__x86_64__)
static unsigned long cache_type(void)
{
	return 0;
}

static void write_return(unsigned long at, unsigned long ctr)
{
	*(volatile unsigned char *)at = 0xc3;	/* ret */
}
#elif defined(__aarch64__)
static unsigned long cache_type(void)
{
	unsigned long ctr;

	asm volatile("mrs %0, ctr_el0" : "=r"(ctr));
	return ctr;
}

static void write_return(unsigned long at, unsigned long ctr)
{
	*(volatile unsigned int *)at = 0xd65f03c0;	/* ret */

	/* Without CTR_EL0.IDC and DIC, the caches have to be maintained. */
	if (!(ctr & (1ul << 28)))
		asm volatile("dc cvau, %0" :: "r"(at) : "memory");
	asm volatile("dsb ish" ::: "memory");
	if (!(ctr & (1ul << 29)))
		asm volatile("ic ivau, %0; dsb ish" :: "r"(at) : "memory");
	asm volatile("isb" ::: "memory");
}
#else
#error "execute_perf_test knows no return instruction of this architecture"
#endif

static void guest_code(unsigned int vcpu_idx)
{
	struct memstress_args *all = &memstress_args;
	struct memstress_vcpu_args *args = &all->vcpu_args[vcpu_idx];
	/* Read it only once, KVM may trap the read. */
	unsigned long ctr = cache_type();
	unsigned long i, at;

	GUEST_ASSERT(args->vcpu_idx == vcpu_idx);

	while (true) {
		enum phase now = READ_ONCE(phase);

		for (i = 0; i < args->pages; i++) {
			at = args->gva + i * all->guest_page_size;
			if (now == WRITE_RETURNS)
				write_return(at, ctr);
			else if (now == EXECUTE)
				((void (*)(void))at)();
			else
				(void)*(volatile unsigned char *)at;
		}
		GUEST_SYNC(now);
	}
}

/* Synchronises all vCPU threads and the host around each phase. */
static pthread_barrier_t meet;

static void vcpu_thread(struct memstress_vcpu_args *args)
{
	struct ucall uc;
	int i;

	for (i = 0; i < NR_PHASES; i++) {
		pthread_barrier_wait(&meet);
		vcpu_run(args->vcpu);
		TEST_ASSERT(get_ucall(args->vcpu, &uc) == UCALL_SYNC,
			    "vCPU %d left for another reason: %s", args->vcpu_idx,
			    exit_reason_str(args->vcpu->run->exit_reason));
		pthread_barrier_wait(&meet);
	}
}

/* Read a binary statistic, if KVM has it. */
static bool read_stat(int fd, const char *name, unsigned long *value)
{
	struct kvm_stats_header header;
	struct kvm_stats_desc *all, *one;
	bool found = false;
	int i;

	read_stats_header(fd, &header);
	all = read_stats_descriptors(fd, &header);
	for (i = 0; i < header.num_desc && !found; i++) {
		one = get_stats_descriptor(all, i, &header);
		found = !strcmp(one->name, name) &&
			pread(fd, value, sizeof(*value),
			      header.data_offset + one->offset) == sizeof(*value);
	}
	free(all);
	return found;
}

/* Print the mapped pages, and the faults of the vCPUs so far. */
static void print_stats(struct kvm_vm *vm, int nr_vcpus)
{
	static const char * const of_vm[] = {
		"pages_4k", "pages_2m", "pages_1g", "nx_lpage_splits",
	};
	static const char * const of_vcpu[] = { "pf_taken", "pf_fixed", "exits" };
	unsigned long one, sum;
	bool found;
	int fd, i, j;

	printf("  ");
	fd = vm_get_stats_fd(vm);
	for (i = 0; i < ARRAY_SIZE(of_vm); i++) {
		if (read_stat(fd, of_vm[i], &one))
			printf(" %s %lu", of_vm[i], one);
	}
	close(fd);

	for (i = 0; i < ARRAY_SIZE(of_vcpu); i++) {
		found = false;
		sum = 0;
		for (j = 0; j < nr_vcpus; j++) {
			fd = vcpu_get_stats_fd(memstress_args.vcpu_args[j].vcpu);
			if (read_stat(fd, of_vcpu[i], &one)) {
				sum += one;
				found = true;
			}
			close(fd);
		}
		if (found)
			printf(" %s %lu", of_vcpu[i], sum);
	}
	printf("\n");
}

static void run_phase(struct kvm_vm *vm, int nr_vcpus, enum phase now)
{
	struct timespec start, took;

	phase = now;
	sync_global_to_guest(vm, phase);

	clock_gettime(CLOCK_MONOTONIC, &start);
	pthread_barrier_wait(&meet);
	pthread_barrier_wait(&meet);
	took = timespec_elapsed(start);

	printf("%-30s: %ld.%09lds\n", phase_names[now], took.tv_sec, took.tv_nsec);
	print_stats(vm, nr_vcpus);
}

static void run_test(enum vm_guest_mode mode, void *arg)
{
	struct test_params *p = arg;
	struct kvm_vm *vm;
	int i;

	vm = memstress_create_vm(mode, p->nr_vcpus, p->vcpu_bytes, p->slots,
				 p->backing_src, p->partition);
	for (i = 0; i < p->nr_vcpus; i++)
		vcpu_arch_set_entry_point(memstress_args.vcpu_args[i].vcpu, guest_code);

	pthread_barrier_init(&meet, NULL, p->nr_vcpus + 1);
	memstress_start_vcpu_threads(p->nr_vcpus, vcpu_thread);

	run_phase(vm, p->nr_vcpus, WRITE_RETURNS);
	run_phase(vm, p->nr_vcpus, EXECUTE);
	if (p->recovery_ms) {
		/* nx_huge_pages_test waits for the same number of periods. */
		usleep(p->recovery_ms * 1000 * 5);
		printf("After %d periods of recovery\n", 5);
		print_stats(vm, p->nr_vcpus);
	}
	run_phase(vm, p->nr_vcpus, READ);

	memstress_join_vcpu_threads(p->nr_vcpus);
	pthread_barrier_destroy(&meet);
	memstress_destroy_vm(vm);
}

#define PARAMETERS "/sys/module/kvm/parameters/nx_huge_pages_recovery_"

/* Set a parameter of the recovery worker and return the old value. */
static void set_recovery(const char *name, const char *value, char *old, size_t len)
{
	char path[128];
	ssize_t n;
	int fd;

	snprintf(path, sizeof(path), PARAMETERS "%s", name);
	fd = open(path, O_RDWR);
	__TEST_REQUIRE(fd >= 0, "%s cannot be opened: no x86, or no root", path);
	n = old ? read(fd, old, len - 1) : 0;
	TEST_ASSERT(n >= 0, "%s cannot be read", path);
	if (old)
		old[n] = 0;
	TEST_ASSERT(pwrite(fd, value, strlen(value), 0) == strlen(value),
		    "%s cannot be written", path);
	close(fd);
}

static void help(const char *name)
{
	printf("usage: %s [-h] [-m mode] [-b bytes] [-v vcpus] [-o] [-s mem-type] [-x slots] [-r ms]\n",
	       name);
	guest_modes_help();
	printf(" -b: memory of each vCPU, e.g. 10M or 3G (default: 1G)\n");
	printf(" -v: number of vCPUs (default: 1)\n");
	printf(" -o: overlap the memory of all vCPUs\n");
	backing_src_help("-s");
	printf(" -x: number of memslots for the memory (default: 1)\n");
	printf(" -r: period in ms of huge page recovery between executing and reading (x86, root)\n");
}

int main(int argc, char *argv[])
{
	struct test_params p = {
		.vcpu_bytes = DEFAULT_PER_VCPU_MEM_SIZE,
		.nr_vcpus = 1,
		.slots = 1,
		.partition = true,
		.backing_src = DEFAULT_VM_MEM_SRC,
	};
	char period[32], ratio[32], ms[16];
	int opt;

	guest_modes_append_default();

	while ((opt = getopt(argc, argv, "b:hm:or:s:v:x:")) != -1) {
		switch (opt) {
		case 'b':
			p.vcpu_bytes = parse_size(optarg);
			break;
		case 'm':
			guest_modes_cmdline(optarg);
			break;
		case 'o':
			p.partition = false;
			break;
		case 'r':
			p.recovery_ms = atoi_positive("Recovery period", optarg);
			break;
		case 's':
			p.backing_src = parse_backing_src_type(optarg);
			break;
		case 'v':
			p.nr_vcpus = atoi_positive("Number of vCPUs", optarg);
			TEST_ASSERT(p.nr_vcpus <= kvm_check_cap(KVM_CAP_MAX_VCPUS),
				    "More vCPUs than KVM can have");
			break;
		case 'x':
			p.slots = atoi_positive("Number of slots", optarg);
			break;
		default:
			help(argv[0]);
			exit(opt != 'h');
		}
	}

	if (p.recovery_ms) {
		snprintf(ms, sizeof(ms), "%d", p.recovery_ms);
		set_recovery("period_ms", ms, period, sizeof(period));
		set_recovery("ratio", "1", ratio, sizeof(ratio));
	}

	for_each_guest_mode(run_test, &p);

	if (p.recovery_ms) {
		set_recovery("period_ms", period, NULL, 0);
		set_recovery("ratio", ratio, NULL, 0);
	}
	return 0;
}

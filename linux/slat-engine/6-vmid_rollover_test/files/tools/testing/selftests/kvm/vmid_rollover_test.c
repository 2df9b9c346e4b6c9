// SPDX-License-Identifier: GPL-2.0-only
/*
 * More VMs alive than there are VMIDs, if those have 8 bits: KVM gives a VM
 * another VMID when it runs the next time, which another VM had before. Each
 * VM must find its own page there, and the one that the host put in its place
 * while the VM did not run. Two threads run VMs, so that VMIDs roll over while
 * a VM runs.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kvm_util.h"
#include "processor.h"
#include "test_util.h"
#include "ucall_common.h"

#define MEMORY_GPA	0x80000000ul
#define MEMORY_SLOT	1

#define THREADS		2

static unsigned long count = 300, rounds = 4;
static struct kvm_vcpu **vcpus;
static struct kvm_vm **vms;

static unsigned long word_of(unsigned long id, unsigned long round)
{
	return id << 32 | round;
}

static void guest_code(unsigned long id)
{
	volatile unsigned long *word = (void *)MEMORY_GPA;
	unsigned long round;

	for (round = 0;; round++) {
		GUEST_ASSERT_EQ(*word, word_of(id, round));
		GUEST_SYNC(0);
	}
}

static void run_vcpu(struct kvm_vcpu *vcpu)
{
	struct ucall uc;

	vcpu_run(vcpu);
	switch (get_ucall(vcpu, &uc)) {
	case UCALL_SYNC:
		break;
	case UCALL_ABORT:
		REPORT_GUEST_ASSERT(uc);
		break;
	default:
		TEST_FAIL("The guest left for another reason: %s",
			  exit_reason_str(vcpu->run->exit_reason));
	}
}

/* Runs every VM whose number leaves the same remainder. */
static void *run_some(void *first)
{
	unsigned long round, id;

	for (round = 0; round < rounds; round++) {
		for (id = (unsigned long)first; id < count; id += THREADS) {
			unsigned long *word = addr_gpa2hva(vms[id], MEMORY_GPA);

			TEST_ASSERT(!madvise(word, getpagesize(), MADV_DONTNEED), "madvise");
			*word = word_of(id, round);
			run_vcpu(vcpus[id]);
		}
	}
	return NULL;
}

int main(int argc, char **argv)
{
	struct rlimit files = { 65536, 65536 };
	pthread_t threads[THREADS];
	unsigned long id;
	int opt;

	while ((opt = getopt(argc, argv, "hn:r:")) != -1) {
		switch (opt) {
		case 'n':
			count = atoi_positive("Number of VMs", optarg);
			break;
		case 'r':
			rounds = atoi_positive("Number of rounds", optarg);
			break;
		default:
			printf("usage: %s [-n VMs] [-r rounds]\n", argv[0]);
			exit(opt != 'h');
		}
	}
	setrlimit(RLIMIT_NOFILE, &files);
	vms = calloc(count, sizeof(*vms));
	vcpus = calloc(count, sizeof(*vcpus));
	TEST_ASSERT(vms && vcpus, "No memory");

	for (id = 0; id < count; id++) {
		vms[id] = vm_create_with_one_vcpu(&vcpus[id], guest_code);
		vm_userspace_mem_region_add(vms[id], VM_MEM_SRC_ANONYMOUS, MEMORY_GPA,
					    MEMORY_SLOT, getpagesize() / vms[id]->page_size, 0);
		virt_map(vms[id], MEMORY_GPA, MEMORY_GPA, 1);
		vcpu_args_set(vcpus[id], 1, id);
	}
	for (id = 0; id < THREADS; id++)
		TEST_ASSERT(!pthread_create(&threads[id], NULL, run_some, (void *)id), "No thread");
	for (id = 0; id < THREADS; id++)
		pthread_join(threads[id], NULL);
	for (id = 0; id < count; id++)
		kvm_vm_free(vms[id]);
	pr_info("%lu VMs, %lu rounds\n", count, rounds);
	return 0;
}

/*
 * A guest under KVM HV on Power, whose memory is written, compared, and aged.
 *
 * It runs in real mode: its accesses are translated by KVM's partition-scoped
 * radix tree alone. It leaves by a hypercall that KVM does not know, and gets the
 * arguments of its next round in the registers of that hypercall.
 *
 * - Each page has the value that the guest wrote last.
 * - After idle page tracking has marked all pages, the pages that the guest used
 *   are found young, and no others.
 * - -s: how long one scan takes and how often it acquires mmu_lock.
 * - -b: the notifier that answers for 64 pages has each of their bits right; and what the
 *   multi-generational LRU calls, with it and without.
 * - -r: the pages are unmapped and used while another thread ages them.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <linux/kvm.h>

#define SKIP		4
#define CODE_BYTES	0x10000ul
#define CODE_GPA	0x4000ul
#define MEMORY_GPA	0x40000000ul
#define IDLE		"/sys/kernel/mm/page_idle/bitmap"
#define TRACING		"/sys/kernel/tracing/"
#define RANGES		"/sys/kernel/debug/mmu_notifier_age"
#define LRU_GEN		"/sys/kernel/debug/lru_gen"
#define COMPONENTS	"/sys/kernel/mm/lru_gen/enabled"

/* MSR: 64 bits, machine check, recoverable, little endian; no translation. */
#define MSR		(1ul << 63 | 1ul << 12 | 1ul << 1 | 1ul)
/* Hypercalls of this number and the next one are not KVM's. */
#define LEAVE		0xff00
#define TRAPPED		0xff01

/* r4 address, r5 pages, r6 bytes from page to page, r7 round, r8 writes */
extern const char guest_start[], guest_trap[], guest_end[];
asm(".pushsection .rodata\n"
    ".balign 8\n"
    "guest_start:\n"
    "	mtctr	5\n"
    "	li	11,0\n"
    "1:	add	10,4,7\n"
    "	cmpdi	8,0\n"
    "	beq	2f\n"
    "	std	10,0(4)\n"
    "	b	3f\n"
    "2:	ld	9,0(4)\n"
    "	cmpd	9,10\n"
    "	beq	3f\n"
    "	addi	11,11,1\n"
    "3:	add	4,4,6\n"
    "	bdnz	1b\n"
    "	mr	4,11\n"
    "	li	3,0\n"
    "	ori	3,3,0xff00\n"
    "	sc	1\n"
    "	b	guest_start\n"
    "guest_trap:\n"
    "	mfsrr0	4\n"
    "	mfsrr1	5\n"
    "	li	3,0\n"
    "	ori	3,3,0xff01\n"
    "	sc	1\n"
    "	b	guest_trap\n"
    "guest_end:\n"
    ".popsection\n");

static size_t page_size, pages = 4096;
static char *memory;
static int vcpu, idle_file, pagemap;
static struct kvm_run *run;
static bool stop;
static unsigned long asked;

static void __attribute__((noreturn, format(printf, 2, 3))) leave(int code, const char *text, ...)
{
	va_list list;

	va_start(list, text);
	vprintf(text, list);
	va_end(list);
	printf("\n");
	exit(code);
}

#define check(it, ...) do { if (!(it)) leave(1, __VA_ARGS__); } while (0)

static int request(int fd, unsigned long what, const void *with, const char *name)
{
	int got = ioctl(fd, what, with);

	check(got >= 0, "%s: %s", name, strerror(errno));
	return got;
}
#define REQUEST(fd, what, with) request(fd, what, (const void *)(with), #what)

/*
 * In nanoseconds. No number here is a fraction: under QEMU 7.2 the thread of a vCPU at times loses
 * its floating-point registers in KVM_RUN.
 */
static unsigned long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ul + time.tv_nsec;
}

static void map(int vm, int slot, unsigned long gpa, void *where, size_t bytes)
{
	struct kvm_userspace_memory_region region = {
		.slot = slot, .guest_phys_addr = gpa, .memory_size = bytes,
		.userspace_addr = (unsigned long)where,
	};

	REQUEST(vm, KVM_SET_USER_MEMORY_REGION, &region);
}

static void *allocate(size_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	check(at != MAP_FAILED, "No memory");
	return at;
}

static void create(void)
{
	int kvm = open("/dev/kvm", O_RDWR), vm;
	struct kvm_enable_cap hypercalls = { .cap = KVM_CAP_PPC_PAPR };
	struct kvm_regs regs = { .pc = CODE_GPA, .msr = MSR };
	char *code;
	size_t at;

	if (kvm < 0)
		leave(SKIP, "SKIP - /dev/kvm: %s", strerror(errno));
	vm = ioctl(kvm, KVM_CREATE_VM, KVM_VM_PPC_HV);
	if (vm < 0)
		leave(SKIP, "SKIP - no KVM HV: %s", strerror(errno));
	code = allocate(CODE_BYTES);
	memory = allocate(pages * page_size);
	madvise(memory, pages * page_size, MADV_NOHUGEPAGE);
	for (at = 0x100; at < 0x2000; at += 0x20)
		memcpy(code + at, guest_trap, guest_end - guest_trap);
	memcpy(code + CODE_GPA, guest_start, guest_end - guest_start);
	map(vm, 0, 0, code, CODE_BYTES);
	map(vm, 1, MEMORY_GPA, memory, pages * page_size);
	vcpu = REQUEST(vm, KVM_CREATE_VCPU, 0);
	run = mmap(NULL, REQUEST(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE,
		   MAP_SHARED, vcpu, 0);
	check(run != MAP_FAILED, "The vCPU cannot be mapped");
	REQUEST(vcpu, KVM_ENABLE_CAP, &hypercalls);
	/* Its first round compares one page, and leaves for the arguments of the next. */
	regs.gpr[4] = MEMORY_GPA;
	regs.gpr[5] = 1;
	REQUEST(vcpu, KVM_SET_REGS, &regs);
}

/* Let the guest write or compare each page from first on, in steps. */
static void use(size_t first, size_t step, unsigned long round, bool writes)
{
	static bool entered;
	int tries;

	for (tries = entered ? 1 : 2; tries; tries--) {
		unsigned long *args = (unsigned long *)run->papr_hcall.args;

		if (entered) {
			args[0] = MEMORY_GPA + first * page_size;
			args[1] = (pages - first + step - 1) / step;
			args[2] = step * page_size;
			args[3] = round << 40;
			args[4] = writes;
		}
		entered = true;
		REQUEST(vcpu, KVM_RUN, 0);
		check(run->exit_reason == KVM_EXIT_PAPR_HCALL, "The guest left for reason %d",
		      run->exit_reason);
		check(run->papr_hcall.nr == LEAVE, "The guest trapped at %lx, SRR1 %lx",
		      run->papr_hcall.args[0], run->papr_hcall.args[1]);
	}
	check(writes || !run->papr_hcall.args[0], "Round %lu: %lu pages have another value",
	      round, run->papr_hcall.args[0]);
}

static unsigned long frame(size_t page)
{
	off_t at = ((unsigned long)memory / page_size + page) * 8;
	unsigned long entry;

	check(pread(pagemap, &entry, 8, at) == 8, "The page map cannot be read");
	return entry >> 63 ? entry & ((1ul << 55) - 1) : 0;
}

static void mark(unsigned long frame)
{
	unsigned long bit = 1ul << frame % 64;

	check(pwrite(idle_file, &bit, 8, frame / 64 * 8) == 8, "Frame %lx cannot be marked", frame);
}

static bool is_idle(unsigned long frame)
{
	unsigned long bits;

	check(pread(idle_file, &bits, 8, frame / 64 * 8) == 8, "Frame %lx cannot be read", frame);
	return bits >> frame % 64 & 1;
}

/* New pages that wait in a CPU's batch are on no list yet, and cannot be marked. */
static void drain(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);

	check(write(fd, "1", 1) == 1, "New pages cannot be put on the lists");
	close(fd);
}

static bool put_path(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_TRUNC), got = write(fd, text, strlen(text));

	close(fd);
	return got == (int)strlen(text);
}

static bool put(const char *file, const char *text)
{
	char path[80];

	snprintf(path, sizeof(path), TRACING "%s", file);
	return put_path(path, text);
}

/* Returns how many events the trace has had, and the first value of a kvm= in it. */
static unsigned long traced(unsigned long *kvm)
{
	FILE *file = fopen(TRACING "trace", "r");
	unsigned long written = 0;
	char line[300], *at;

	while (file && fgets(line, sizeof(line), file)) {
		at = strstr(line, "entries-written: ");
		if (at && (at = strchr(at, '/')))
			written = strtoul(at + 1, NULL, 10);
		at = strstr(line, "kvm=");
		if (kvm && at && !*kvm)
			*kvm = strtoul(at + 4, NULL, 16);
	}
	if (file)
		fclose(file);
	return written;
}

/* Mark all pages, or only ask, and say what that took. */
static size_t scan(const char *what, bool marks)
{
	unsigned long begin = now();
	size_t page, young = 0;

	for (page = 0; page < pages; page++) {
		unsigned long at = frame(page);

		if (marks)
			mark(at);
		else
			young += !is_idle(at);
	}
	printf("%s: %lu ns a page\n", what, (now() - begin) / pages);
	return young;
}

static void mark_all(void)
{
	scan("Scan with a probe", true);
}

/* The newest generation of the root's memory cgroup, which is the first. */
static unsigned long newest(unsigned int *group)
{
	unsigned long found, generation = 0;
	unsigned int number, groups = 0;
	FILE *text = fopen(LRU_GEN, "r");
	char line[256];

	while (text && fgets(line, sizeof(line), text)) {
		if (sscanf(line, "memcg %u", &number) == 1) {
			if (groups++)
				break;
			*group = number;
		} else if (sscanf(line, "%lu", &found) == 1) {
			generation = found;
		}
	}
	if (text)
		fclose(text);
	return generation;
}

/*
 * On Power MGLRU asks only about pages that it is about to evict, and about their
 * neighbours: let all pages be the oldest, although the guest has used them.
 */
static void evict(void)
{
	unsigned int group = 0, at;
	unsigned long oldest = newest(&group);
	char command[80];

	for (at = 0; at < 2; at++) {
		snprintf(command, sizeof(command), "+ %u 0 %lu 1 1", group, oldest + at);
		check(put_path(LRU_GEN, command), LRU_GEN ": %s failed", command);
	}
	snprintf(command, sizeof(command), "- %u 0 %lu 200 %zu", group, oldest, 4 * pages);
	check(put_path(LRU_GEN, command), LRU_GEN ": %s failed", command);
}

/* Count calls of a function by the trace, with a condition on its argument. */
static unsigned long count(const char *probe, const char *filter, void (*run_it)(void),
			   unsigned long *kvm)
{
	unsigned long got;

	check(put("kprobe_events", probe) && (!filter || put("events/kprobes/slat/filter", filter)) &&
	      put("trace", "") && put("events/kprobes/slat/enable", "1"), "%s: no trace", probe);
	run_it();
	put("events/kprobes/slat/enable", "0");
	got = traced(kvm);
	put("kprobe_events", "");
	return got;
}

static void say(void)
{
	unsigned long kvm = 0, calls, locks;
	char filter[60];

	use(0, 1, 3, true);
	scan("One scan that clears", true);
	scan("One scan that clears nothing", true);
	use(0, 1, 3, false);
	calls = count("p:slat kvm_age_gfn kvm=%gpr3:x64", NULL, mark_all, &kvm);
	check(kvm, "KVM was not asked");
	use(0, 1, 3, false);
	/* mmu_lock is the first member of struct kvm. */
	snprintf(filter, sizeof(filter), "lock == %#lx", kvm);
	locks = count("p:slat _raw_spin_lock lock=%gpr3:x64", filter, mark_all, NULL);
	printf("%zu pages: kvm_age_gfn was called %lu times, mmu_lock was acquired %lu times\n",
	       pages, calls, locks);
}

/* Ask for up to 64 pages at once, by the file of the series batched-ageing. */
static unsigned long ask(int file, size_t first, int number, bool clear, unsigned long asked_for)
{
	unsigned long young, unanswered, coarse;
	char text[80];
	ssize_t got;

	snprintf(text, sizeof(text), "%lx %d %d %lx", (unsigned long)memory + first * page_size,
		 number, clear, asked_for);
	check(write(file, text, strlen(text)) == (ssize_t)strlen(text), "%s: %s: %s", RANGES, text,
	      strerror(errno));
	got = pread(file, text, sizeof(text) - 1, 0);
	check(got > 0, "%s has no answer", RANGES);
	text[got] = 0;
	check(sscanf(text, "%lx %lx %lx", &young, &unanswered, &coarse) == 3, "An answer is %s",
	      text);
	check(!unanswered && !coarse, "Pages of 4K of a radix guest stay unanswered: %s", text);
	return young;
}

static void check_range(int file, size_t first, int number, bool clear, unsigned long asked_for,
			unsigned long right)
{
	unsigned long young = ask(file, first, number, clear, asked_for);

	check(young == right, "Pages from %zu, asked for %lx: %lx are young, and should be %lx",
	      first, asked_for, young, right);
}

static void ranges(void)
{
	int file = open(RANGES, O_RDWR);
	unsigned long all = ~0ul, every_third = 0x9249249249249249, at;
	unsigned long begin;
	size_t first;

	if (file < 0)
		leave(SKIP, "SKIP - the kernel has not the series batched-ageing");
	check(pages >= 1024 && pages % 64 == 0, "Ranges need 1,024 pages, and a multiple of 64");
	use(0, 1, 4, true);
	begin = now();
	for (first = 0; first < pages; first += 64)
		ask(file, first, 64, true, all);
	printf("One scan by ranges, which clears: %lu ns a page\n", (now() - begin) / pages);
	for (first = 0; first < pages; first += 64)
		check_range(file, first, 64, false, all, 0);

	/* Pages 0, 3, 6 and so on are used: each answer starts at another place. */
	use(0, 3, 4, false);
	for (first = 0; first + 64 <= pages; first += 61) {
		at = first % 3 == 0 ? every_third : first % 3 == 1 ? every_third << 2 : every_third << 1;
		check_range(file, first, 64, false, all, at);
		check_range(file, first, 64, false, 0xff00ff00ff00ff00, at & 0xff00ff00ff00ff00);
		check_range(file, first, 7, false, 0x7f, at & 0x7f);
	}
	/* Only what was asked for is cleared. Pages 480 to 543 lie in two tables. */
	check_range(file, 480, 64, true, 0xf0f0, every_third & 0xf0f0);
	check_range(file, 480, 64, true, all, every_third & ~0xf0f0ul);
	check_range(file, 480, 64, true, all, 0);
	/* A page that was unmapped is not answered for. */
	use(0, 1, 4, false);
	check(!madvise(memory + 70 * page_size, 5 * page_size, MADV_DONTNEED), "madvise failed");
	check_range(file, 64, 64, true, all, all & ~(0x1ful << 6));
	printf("Ranges have each bit right\n");
	close(file);
}

static void generations(void)
{
	static const char *const functions[] = {
		"lru_gen_look_around", "__mmu_notifier_clear_young", "__mmu_notifier_age",
	};
	int batched;
	size_t at;

	for (batched = 0; batched < 2; batched++) {
		check(put_path(COMPONENTS, batched ? "0x000f" : "0x0007"), COMPONENTS);
		printf("Eviction by MGLRU, batches %s:", batched ? "on" : "off");
		for (at = 0; at < sizeof(functions) / sizeof(*functions); at++) {
			char probe[80];

			use(0, 1, 5, true);
			snprintf(probe, sizeof(probe), "p:slat %s", functions[at]);
			printf("%s %lu calls of %s", at ? "," : "",
			       count(probe, NULL, evict, NULL), functions[at]);
		}
		printf("\n");
	}
}

static void *age(void *cpu)
{
	cpu_set_t set;
	size_t page;

	CPU_ZERO(&set);
	CPU_SET((long)cpu, &set);
	check(!sched_setaffinity(0, sizeof(set), &set), "No second CPU");
	while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
		for (page = 0; page < pages; page++) {
			unsigned long at = frame(page);

			if (at)
				mark(at);
			__atomic_add_fetch(&asked, 1, __ATOMIC_RELAXED);
		}
	}
	return NULL;
}

/* Unmap all pages and use them again, while they are aged. */
static void race(unsigned long rounds)
{
	long cpu = sysconf(_SC_NPROCESSORS_ONLN) - 1;
	unsigned long round;
	pthread_t ager;
	unsigned long begin = now();

	pthread_create(&ager, NULL, age, (void *)cpu);
	for (round = 1; round <= rounds; round++) {
		use(0, 1, round, true);
		use(0, 1, round, false);
		check(!madvise(memory, pages * page_size, MADV_DONTNEED), "madvise failed");
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	pthread_join(ager, NULL);
	printf("%lu rounds of %zu pages in %lu ms, while %lu pages were asked for\n", rounds, pages,
	       (now() - begin) / 1000000, asked);
}

int guest(int argc, char **argv)
{
	unsigned long rounds = 0;
	bool counts = false, by_ranges = false;
	size_t page;
	int option;

	setvbuf(stdout, NULL, _IOLBF, 0);
	page_size = getpagesize();
	while ((option = getopt(argc, argv, "bp:r:s")) != -1) {
		if (option == 'p')
			pages = strtoul(optarg, NULL, 10);
		else if (option == 'r')
			rounds = strtoul(optarg, NULL, 10);
		else if (option == 's')
			counts = true;
		else if (option == 'b')
			by_ranges = true;
		else
			leave(1, "usage: %s [-b] [-p pages] [-r rounds] [-s]", argv[0]);
	}
	check(pages >= 2, "At least two pages are needed");
	create();

	use(0, 1, 1, true);
	use(0, 1, 1, false);
	for (page = 0; page < pages; page++) {
		unsigned long word = *(unsigned long *)(memory + page * page_size);

		check(word == MEMORY_GPA + page * page_size + (1ul << 40),
		      "Page %zu has the value %lx", page, word);
	}
	printf("The guest wrote and compared %zu pages\n", pages);

	idle_file = open(IDLE, O_RDWR);
	pagemap = open("/proc/self/pagemap", O_RDONLY);
	if (idle_file < 0 || pagemap < 0)
		leave(SKIP, "SKIP - no idle page tracking");
	drain();
	scan("Marking all pages", true);
	use(1, 3, 1, false);
	for (page = 0; page < pages; page++) {
		bool used = page % 3 == 1, idle = is_idle(frame(page));

		check(used != idle, "Page %zu was %sused and is %s", page, used ? "" : "not ",
		      idle ? "idle" : "young");
	}
	printf("The pages that the guest used are young, and no others\n");
	use(0, 2, 2, true);
	use(0, 2, 2, false);
	if (counts)
		say();
	if (by_ranges) {
		ranges();
		generations();
	}
	if (rounds)
		race(rounds);
	return 0;
}

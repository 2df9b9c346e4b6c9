/*
 * The first process of an emulated machine of Power, where slat itself cannot run:
 * its library of KVM's calls has none for Power. It mounts file systems, runs the
 * tests of its job, sends the answer that slat decodes, and ends the machine.
 *
 * The job has the serial line in its first line, and each test in a line of its
 * own: seconds, program and arguments, with tabs between them.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define OUTPUT	"/tmp/test"
#define KEPT	2000
#define WORDS	40

int guest(int argc, char **argv);

static char answer[1 << 20];
static size_t used;

static void add(const char *text)
{
	size_t bytes = strlen(text);

	if (used + bytes < sizeof(answer)) {
		memcpy(answer + used, text, bytes);
		used += bytes;
	}
}

static void add_escaped(const char *text, size_t bytes)
{
	char one[8];

	for (; bytes; bytes--, text++) {
		unsigned char c = *text;

		if (c == '"' || c == '\\')
			snprintf(one, sizeof(one), "\\%c", c);
		else if (c < ' ' || c > '~')
			snprintf(one, sizeof(one), "\\u%04x", c);
		else
			snprintf(one, sizeof(one), "%c", c);
		add(one);
	}
}

static uint32_t crc32(const char *data, size_t bytes)
{
	uint32_t sum = ~0u;
	int bit;

	for (; bytes; bytes--) {
		sum ^= (unsigned char)*data++;
		for (bit = 0; bit < 8; bit++)
			sum = sum >> 1 ^ (sum & 1 ? 0xedb88320 : 0);
	}
	return ~sum;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* Run a test, and add its result to the answer. */
static void test(char **words, double limit)
{
	static char said[KEPT];
	double begin = now();
	int status, late = 0, file;
	char text[120];
	ssize_t got;
	pid_t child = fork();

	if (!child) {
		file = open(OUTPUT, O_WRONLY | O_CREAT | O_TRUNC, 0600);
		dup2(file, 1);
		dup2(file, 2);
		execv(words[0], words);
		perror(words[0]);
		_exit(127);
	}
	while (!waitpid(child, &status, WNOHANG)) {
		struct timespec pause = { .tv_nsec = 20000000 };

		if (now() - begin > limit && !late) {
			late = 1;
			kill(child, SIGKILL);
		}
		nanosleep(&pause, NULL);
	}
	if (WIFEXITED(status))
		snprintf(text, sizeof(text), "{\"exit_code\":%d", WEXITSTATUS(status));
	else
		snprintf(text, sizeof(text), "{\"exit_code\":null");
	add(text);
	snprintf(text, sizeof(text), ",\"timed_out\":%s,\"seconds\":%.3f,\"output\":\"",
		 late ? "true" : "false", now() - begin);
	add(text);
	file = open(OUTPUT, O_RDONLY);
	if (lseek(file, -KEPT, SEEK_END) < 0)
		lseek(file, 0, SEEK_SET);
	got = read(file, said, sizeof(said));
	close(file);
	add_escaped(said, got > 0 ? got : 0);
	add("\"}");
	fprintf(stderr, "%s: status %#x\n", words[0], status);
}

static void send(const char *port)
{
	char head[40];
	int line = open(port, O_RDWR | O_NOCTTY), size;
	struct termios mode;
	size_t at = 0;

	tcgetattr(line, &mode);
	cfmakeraw(&mode);
	tcsetattr(line, TCSANOW, &mode);
	size = snprintf(head, sizeof(head), "slat-answer %08zx %08x\n", used, crc32(answer, used));
	if (write(line, head, size) != size)
		perror(port);
	while (at < used) {
		ssize_t got = write(line, answer + at, used - at);

		if (got <= 0) {
			perror(port);
			break;
		}
		at += got;
	}
	tcdrain(line);
}

int main(int argc, char **argv)
{
	static char line[4096], port[80];
	static const char *const places[][2] = {
		{ "devtmpfs", "/dev" }, { "proc", "/proc" }, { "sysfs", "/sys" },
		{ "tmpfs", "/tmp" }, { "debugfs", "/sys/kernel/debug" },
		{ "tracefs", "/sys/kernel/tracing" },
	};
	FILE *job;
	size_t at;

	if (getpid() != 1)
		return guest(argc, argv);
	for (at = 0; at < sizeof(places) / sizeof(*places); at++)
		mount(places[at][0], places[at][1], places[at][0], 0, NULL);
	job = fopen("/job.lines", "r");
	if (job && fgets(port, sizeof(port), job)) {
		port[strcspn(port, "\n")] = 0;
		add("{\"error\":null,\"exit_code\":null,\"stderr\":\"\",\"report\":null,\"tests\":[");
		for (at = 0; fgets(line, sizeof(line), job); at++) {
			char *words[WORDS + 1] = { NULL }, *rest = line, *word;
			int count = 0;

			line[strcspn(line, "\n")] = 0;
			while (count < WORDS && (word = strsep(&rest, "\t")))
				words[count++] = word;
			if (at)
				add(",");
			test(words + 1, strtod(words[0], NULL));
		}
		add("]}");
		send(port);
	}
	sync();
	reboot(RB_POWER_OFF);
	reboot(RB_AUTOBOOT);
	for (;;)
		pause();
}

// SPDX-License-Identifier: GPL-2.0-only
/*
 * A file of debugfs by which a test asks secondary MMUs for accessed bits.
 */
#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/init.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/sched.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

static ssize_t age_write(struct file *file, const char __user *buf, size_t len, loff_t *pos)
{
	struct mmu_notifier_age *pages = ((struct seq_file *)file->private_data)->private;
	struct mmu_notifier_age ask = {};
	struct mm_struct *mm = current->mm;
	unsigned int clear;
	char text[80];

	if (!mm || len >= sizeof(text))
		return -EINVAL;
	if (copy_from_user(text, buf, len))
		return -EFAULT;
	text[len] = 0;
	if (sscanf(text, "%lx %u %u %lx", &ask.start, &ask.nr, &clear, &ask.asked) != 4)
		return -EINVAL;
	if (!PAGE_ALIGNED(ask.start) || !ask.nr || ask.nr > MMU_NOTIFIER_AGE_PAGES || clear > 1)
		return -EINVAL;
	if (ask.asked & ~GENMASK(ask.nr - 1, 0))
		return -EINVAL;
	if (ask.start >= TASK_SIZE || TASK_SIZE - ask.start < ask.nr * PAGE_SIZE)
		return -EINVAL;
	ask.clear = clear;

	mmap_read_lock(mm);
	mmu_notifier_age(mm, &ask);
	mmap_read_unlock(mm);

	*pages = ask;
	return len;
}

static int age_show(struct seq_file *seq, void *unused)
{
	const struct mmu_notifier_age *pages = seq->private;

	seq_printf(seq, "%lx %lx %lx\n", pages->young, pages->unanswered, pages->coarse);
	return 0;
}

static int age_open(struct inode *inode, struct file *file)
{
	struct mmu_notifier_age *pages = kzalloc(sizeof(*pages), GFP_KERNEL);
	int err;

	if (!pages)
		return -ENOMEM;
	err = single_open(file, age_show, pages);
	if (err)
		kfree(pages);
	return err;
}

static int age_release(struct inode *inode, struct file *file)
{
	kfree(((struct seq_file *)file->private_data)->private);
	return single_release(inode, file);
}

static const struct file_operations age_fops = {
	.owner		= THIS_MODULE,
	.open		= age_open,
	.read		= seq_read,
	.write		= age_write,
	.llseek		= seq_lseek,
	.release	= age_release,
};

static int __init age_init(void)
{
	debugfs_create_file("mmu_notifier_age", 0600, NULL, NULL, &age_fops);
	return 0;
}
late_initcall(age_init);

#!/bin/sh
# The guest's first process: does what slat.work says on the kernel's command line, and powers off.
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
echo "guest: $(uname -r), $(nproc) CPUs"

finish() {
    echo "guest: $1"
    poweroff -f
}

# Says a CPU's new state and believes what the kernel says it is.
switch() {
    echo "$2" > "$1/online" || return 1
    [ "$(cat "$1/online")" = "$2" ] || return 1
    [ "$2" = 1 ] && state=on || state=off
    echo "guest: cpu ${1##*cpu} $state"
}

secondary() {
    for cpu in /sys/devices/system/cpu/cpu[1-9]*; do
        [ ! -e "$cpu" ] || echo "$cpu"
    done
}

hotplug() {
    all=$(nproc)
    for round in 1 2; do
        for cpu in $(secondary); do
            switch "$cpu" 0 && switch "$cpu" 1 || return 1
        done
    done
    [ "$(nproc)" = "$all" ]
}

# The second kernel has the same work's command line, without the work.
kexec() {
    for cpu in $(secondary); do
        switch "$cpu" 0 || return 1
    done
    [ ! -e /boot/initrd ] || initrd=/boot/initrd
    work kexec /boot/Image "$rest slat.second" $initrd
}

rest=
for word in $(cat /proc/cmdline); do
    case $word in
        slat.work=*) work=${word#slat.work=} ;;
        slat.second) echo "guest: second kernel" ;;
        *) rest="$rest $word" ;;
    esac
done

IFS=,
set -- $work
unset IFS
case $1 in
    '') ;;
    hotplug) hotplug || finish FAILED ;;
    kexec) [ -e /boot/Image ] && kexec || finish FAILED ;;
    *) work "$@" || finish FAILED ;;
esac
finish done

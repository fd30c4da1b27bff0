# USR1: time limit near; TERM: preempted or cancelled. The task checkpoints its run, releases the lease, and requeues
# itself, unless Slurm ended or requeued the job. INT (`sparsedepth stop`): the same without requeueing.
task=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID  # SLURM_JOB_ID of the last task stands for the whole array
log={folder}/$task.log
ends={folder}/$task.jsonl
log_size=$(stat -c %s "$log" 2>/dev/null)
start={folder}/.$task.start  # newer files were written by this start
touch "$start"
again= why= alarm=
leave() { [ "$again" = no ] || again=$1; why=${why:-$2}; kill -TERM "$work" 2>/dev/null; }
left() {  # seconds to the time limit
    local text=$(timeout 10 squeue --noheader --format=%L --jobs="$task")
    [[ $text =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return
    local part=("${BASH_REMATCH[@]}")
    echo $((((10#${part[2]:-0} * 24 + 10#${part[4]:-0}) * 60 + 10#${part[5]}) * 60 + 10#${part[6]}))
}
warned() {  # Slurm may warn up to a minute early
    local early=$(($(left) - {warning}))
    if [ "$early" -gt 5 ] && [ ! "$alarm" ]; then
        { sleep "$early"; kill -USR1 $$; } > /dev/null 2>&1 & alarm=$!
    else
        leave yes "time limit"
    fi
}
trap warned USR1 USR2
trap 'leave yes "preempted or cancelled"' TERM
trap 'leave no stopped' INT

{command} &
work=$!
[ -z "$again" ] || kill -TERM "$work"
while kill -0 "$work" 2>/dev/null; do wait "$work"; done
wait "$work"; code=$?
[ "$code" -ge 0 ] || code=143  # bash may lose it between two signals
[ ! "$alarm" ] || kill "$alarm" 2>/dev/null
progress=true took=$SECONDS
if [ "$why" = "time limit" ] && [ "$code" -ne 0 ]; then
    made=(-name complete -o -name 'step-*.json' -o -name failures.json -o -name memory.json -o -name pruned.json)
    cd {results} && new=$(find runs work -maxdepth 3 -newer "$start" \( "${made[@]}" \) -print -quit 2>/dev/null)
    # What --time leaves is one figure, for this log and for `status`; the clock's differs by a second each time.
    [ "$new" ] || { progress=false; took={available}; took=${took:-$SECONDS}; }
    before=$(tail -n {others} "$ends" 2>/dev/null | grep -c '"progress": false')
    if [ ! "$new" ] && [ "$before" -ge {others} ]; then
        again=no
        echo "sparsedepth: error: reached the time limit {starts} times in a row without progress; {advice}" >&2
    fi
fi
rm -f "$start"

[ "$code" -le 128 ] || [ "$again" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge {max_kills} ] || again=yes
if [ "$code" -gt 128 ] && [ "$again" = yes ]; then
    for pause in 2 5 10 20 0; do  # the controller may be starting again
        state=$(squeue --noheader --states=all --format=%T:%r --jobs="$task") && [ "$state" ] && break
        sleep "$pause"
    done
    case $state in RUNNING:* | *:TimeLimit) ;; *) again=no ;; esac
fi
# For `sparsedepth status`: why this start ended (Slurm writes its reason into the log).
due=$(tail -c "+$((${log_size:-0} + 1))" "$log" 2>/dev/null | sed -n 's/.* DUE TO \([A-Z ]*\) \*\*\*$/\1/p')
[ "$why" ] || case $code in 0) why=done ;; 137) why="killed, perhaps out of memory" ;; *) why="exit code $code" ;; esac
[ -z "$due" ] || why=$(echo "$due" | tail -n 1 | tr '[:upper:]' '[:lower:]')
printf '{"restarts": %d, "seconds": %d, "reason": "%s", "progress": %s}\n' \
    "${SLURM_RESTART_COUNT:-0}" "$took" "$why" "$progress" >> "$ends"
[ "$code" -le 128 ] || [ "$again" != yes ] || scontrol requeue "$task"
exit "$code"

//! Failures, signals, and what is left behind.

use super::*;

#[test]
fn the_exit_code_is_that_of_the_first_failure() {
    let folder = Folder::new();
    let (first, script) = (folder.path("first"), waits_for(&folder.path("first")));
    let script = format!(
        "case $RANK in 1) touch {}; exit 3;; *) {script}; sleep 0.3; exit 4;; esac",
        first.display()
    );
    let output = shell(&["-n", "3"], &script);
    assert_eq!(output.status.code(), Some(3));
    let text = err(&output);
    assert!(
        text.contains("process 1 (pid ") && text.contains(") failed first: exit code 3"),
        "{text}"
    );
    // They ended by themselves.
    assert!(text.contains("processes 0, 2: exit code 4\n"), "{text}");

    let output = shell(&["-n", "1"], "kill -s KILL $$");
    assert_eq!(output.status.code(), Some(137));
    assert!(err(&output).contains("failed first: killed by SIGKILL"));
    assert_eq!(shell(&["-n", "2"], "exit 255").status.code(), Some(255));
    assert_eq!(shell(&["-n", "4"], "exit 0").status.code(), Some(0));
}

#[test]
fn a_killed_process_ends_all_after_their_time_of_grace() {
    let script = "[ $RANK = 2 ] && kill -s KILL $$; exec sleep 600";
    let output = shell(&["-n", "4", "--grace", "0.3"], script);
    assert_eq!(output.status.code(), Some(137));
    let text = err(&output);
    assert!(text.contains("process 2 (pid "), "{text}");
    assert!(
        text.contains("processes 0-1, 3: killed by SIGTERM, told to end"),
        "{text}"
    );
}

#[test]
fn who_does_not_hear_sigterm_is_killed_with_all_it_started() {
    let script =
        "trap '' TERM; [ $RANK = 0 ] && exit 5; sleep 600 & echo pid $!; echo pid $$; wait";
    let args = ["-n", "3", "--grace", "0.2"];
    let output = shell(&args, script);
    assert_eq!(output.status.code(), Some(5));
    assert!(err(&output).contains("processes 1-2: killed by SIGKILL, told to end"));
    let lines: Vec<String> = out(&output).lines().map(str::to_string).collect();
    assert_eq!(lines.len(), 4);
    all_gone(&last_words(&lines));
}

#[test]
fn a_process_that_ends_well_leaves_nothing_behind() {
    let output = shell(&["-n", "2"], "sleep 600 & echo pid $!");
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<String> = out(&output).lines().map(str::to_string).collect();
    assert_eq!(lines.len(), 2);
    all_gone(&last_words(&lines));
}

#[test]
fn what_a_process_leaves_behind_may_finish_its_last_lines() {
    let output = shell(&["-n", "2"], "(sleep 0.3; echo late) & exit 0");
    assert_eq!(sorted(&out(&output)), ["[0] late", "[1] late"]);
}

#[test]
fn signals_are_passed_on_and_there_is_time_to_save() {
    for (signal, number) in [("TERM", 15), ("INT", 2), ("HUP", 1)] {
        let folder = Folder::new();
        let script = format!(
            "trap 'sleep 0.3; echo saved > {}/$RANK; exit 0' {signal}; echo ready; while true; do sleep 0.02; done",
            folder.0.display()
        );
        let mut running = Running::shell(&["-n", "3", "--restarts", "5"], &script);
        running.next(3);
        running.signal(signal);
        assert_eq!(running.code(), Some(0), "{signal}");
        for rank in 0..3 {
            assert!(folder.path(&rank.to_string()).exists(), "{signal} {rank}");
        }

        // Who does not handle it ends by it, and is not started again.
        let args = ["-n", "2", "--restarts", "5"];
        let script = "echo ready; while true; do sleep 0.02; done";
        let mut running = Running::shell(&args, script);
        running.next(2);
        running.signal(signal);
        assert_eq!(running.code(), Some(128 + number), "{signal}");
    }
}

#[test]
fn a_closed_terminal_does_not_end_what_nohup_started() {
    let mut command = command(&["-n", "2", "--", "sh", "-c", "echo ready; exec sleep 600"]);
    hang_up(&mut command, libc::SIG_IGN);
    let mut running = Running::start(command);
    running.next(2);
    running.signal("HUP");
    std::thread::sleep(Duration::from_millis(200));
    assert!(running.child.try_wait().unwrap().is_none());
    running.signal("TERM");
    assert_eq!(running.code(), Some(143));
}

#[test]
fn whoever_asks_three_times_does_not_want_to_wait() {
    let script = "trap '' TERM INT; echo ready; echo pid $$; while true; do sleep 0.05; done";
    let mut running = Running::shell(&["-n", "2"], script);
    let pids = last_words(&running.next(4)[..])
        .into_iter()
        .filter(|word| word != "ready")
        .collect::<Vec<_>>();
    assert_eq!(pids.len(), 2);
    for signal in ["TERM", "INT"] {
        running.signal(signal);
        std::thread::sleep(Duration::from_millis(200));
        assert!(running.child.try_wait().unwrap().is_none());
    }
    running.signal("TERM");
    assert_eq!(running.code(), Some(137));
    all_gone(&pids);
}

#[test]
fn nothing_is_left_when_launch_itself_is_killed() {
    let script = "trap '' TERM HUP INT; sleep 600 & echo pid $!; echo pid $$; wait; sleep 600";
    let folder = Folder::new();
    let flight = folder.path("flight");
    let args = ["-n", "4", "--flight", flight.to_str().unwrap()];
    let mut running = Running::shell(&args, script);
    let pids = last_words(&running.next(8));
    assert!(pids.iter().all(|pid| alive(pid)));
    running.signal("KILL");
    running.child.wait().unwrap();
    all_gone(&pids);
}

#[test]
fn a_reader_that_leaves_does_not_stop_the_processes() {
    let folder = Folder::new();
    let script = format!(
        "echo ready; i=0; while [ $i -lt 2000 ]; do echo $i; i=$((i+1)); done; touch {}/$RANK",
        folder.0.display()
    );
    let mut running = Running::shell(&["-n", "2"], &script);
    running.next(2);
    running.lines = {
        let mut other = Command::new("true").stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(other.stdout.take().unwrap()).lines();
        other.wait().unwrap();
        lines
    };
    assert_eq!(running.code(), Some(0));
    assert!(folder.path("0").exists() && folder.path("1").exists());
}

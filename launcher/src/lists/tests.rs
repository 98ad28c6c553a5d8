use super::*;
use crate::{engine::Engine, replay::Library};
use anymesh_shaders::Arena;

const BYTES: usize = 4096;

/// What a list is given.
const ADDRESS: u64 = 7 << 30;

/// A GPU that is not there: what is queued is written to a log.
struct Scene {
    engine: Engine,
    lists: Lists,
    log: Arc<Mutex<Vec<u64>>>,
}

impl Scene {
    fn new() -> Self {
        let engine = Engine::idle().expect("nothing is opened");
        let lists = Lists::new(engine.way().clone(), engine.arena().clone());
        Self {
            engine,
            lists,
            log: Arc::default(),
        }
    }

    /// Launches something that writes to memory.
    fn launch(&self, to: &Memory) {
        let (writes, log) = (place(to), self.log.clone());
        let at = writes.start;
        self.engine.product(Library {
            identity: [at, 0, 0, 0, 0, 0, 0, 0],
            reads: SmallVec::new(),
            writes,
            workspace: None,
            work: Box::new(move |_| {
                log.lock().expect("nobody panics").push(at);
                Ok(())
            }),
        });
    }

    fn begin(&self, numbers: &[Scalar]) -> Box<dyn Steps + '_> {
        let operand = Buffer::new(memory_at(ADDRESS), BYTES);
        let list = List {
            number: 3,
            operands: &[&operand],
            numbers,
        };
        self.lists.begin(&list).expect("operands of this device")
    }

    /// A list of launches, each of which lets go of the result before the last: the last two
    /// results, and how many launches were made.
    fn run(&self, count: usize, numbers: &[Scalar]) -> (Vec<Buffer>, usize) {
        let mut steps = self.begin(numbers);
        let (mut kept, mut made) = (vec![], 0);
        for _ in 0..count {
            let results = steps.again(&|_| None).unwrap_or_else(|| {
                made += 1;
                let scratch = self.engine.arena().alloc(BYTES).expect("room");
                let result = self.engine.arena().alloc(BYTES).expect("room");
                drop(scratch);
                self.launch(&result);
                let results: Buffers = [result.buffer()].into();
                steps.made(&|_| None, &results);
                results
            });
            kept.extend(results);
            if kept.len() > 2 {
                kept.remove(0);
            }
        }
        (kept, made)
    }

    /// The addresses that were written since it was last asked.
    fn written(&self) -> Vec<u64> {
        let log = self.log.clone();
        let all = (self.engine.way().handle)
            .submit_blocking(move |_| std::mem::take(&mut *log.lock().expect("nobody panics")));
        all.expect("the thread lives")
    }
}

fn memory_at(address: u64) -> Memory {
    use cubecl::server::Handle;
    use cubecl_common::device::{DeviceId, ServiceId};
    let mut handle = Handle::from_memory(
        cubecl_runtime::memory_management::ManagedMemoryHandle::new(),
        ServiceId::of::<Launcher>(DeviceId::new(0, 0)),
        cubecl_environment::stream::StreamId { value: 0 },
        address + BYTES as u64,
    );
    handle.offset_start = Some(address);
    Memory::owned(handle, BYTES, Arc::new(()))
}

fn addresses(buffers: &[Buffer]) -> Vec<u64> {
    let address = |buffer: &Buffer| place(buffer.get().expect("of this device")).start;
    buffers.iter().map(address).collect()
}

#[test]
fn a_list_that_comes_again_gives_its_results_without_its_launches() {
    let scene = Scene::new();
    let (kept, made) = scene.run(5, &[]);
    let (first, written) = (addresses(&kept), scene.written());
    assert_eq!((made, written.len()), (5, 5));
    drop(kept);
    for pass in 0..3 {
        let live = scene.engine.arena().report().live;
        assert_eq!(live, 0, "everything was let go, pass {pass}");
        let (kept, made) = scene.run(5, &[]);
        assert_eq!((made, addresses(&kept)), (0, first.clone()));
        // Written down as a graph the first time, and replayed after that.
        let expected = if pass == 0 { written.clone() } else { vec![] };
        assert_eq!(scene.written(), expected, "pass {pass}");
        assert_eq!(scene.engine.arena().report().live, 2 * BYTES as u64);
    }
}

#[test]
fn where_memory_is_in_use_the_rest_is_launched() {
    let scene = Scene::new();
    let (kept, _) = scene.run(4, &[]);
    let first = scene.written();
    drop(kept);
    // The results of the first two launches can lie where they lay, that of the third cannot.
    let arena = scene.engine.arena();
    let [a, b, c, blocked] = [0; 4].map(|_| arena.alloc(BYTES).expect("room"));
    assert_eq!(place(&blocked).start, first[2]);
    drop([a, b, c]);
    let (kept, made) = scene.run(4, &[]);
    assert_eq!(made, 2);
    let written = scene.written();
    assert_eq!(written[..2], first[..2], "as they were written down");
    assert_eq!(written.len(), 4, "each once");
    assert!(!written.contains(&first[2]), "that is somebody else's");
    assert_eq!(addresses(&kept), written[2..]);
    // That is what is tried from now on.
    drop(kept);
    assert_eq!(scene.run(4, &[]).1, 0);
    // Also where more is free than then.
    drop(blocked);
    assert_eq!(scene.run(4, &[]).1, 0);
}

#[test]
fn other_numbers_are_another_list() {
    let scene = Scene::new();
    let [zero, negative, nan] = [0.0, -0.0, f64::NAN].map(|x| [Scalar::Float(x)]);
    let first = [(zero, 3), (negative, 3), (nan, 3)];
    let again = [(negative, 0), (zero, 0), (nan, 0)];
    for (numbers, expected) in first.into_iter().chain(again) {
        let (_, made) = scene.run(3, &numbers);
        scene.written();
        assert_eq!(made, expected, "{numbers:?}");
    }
}

#[test]
fn a_list_of_which_a_launch_fails_is_not_made_again() {
    let scene = Scene::new();
    for _ in 0..3 {
        let mut steps = scene.begin(&[]);
        assert!(steps.again(&|_| None).is_none());
        assert!(steps.again(&|_| None).is_none(), "the first was not made");
        let result = scene.engine.arena().alloc(BYTES).expect("room");
        scene.launch(&result);
        steps.made(&|_| None, &[result.buffer()]);
        drop(steps);
        assert_eq!(scene.written().len(), 1);
    }
}

#[test]
fn a_list_that_something_else_came_into_is_left_alone_in_the_end() {
    let scene = Scene::new();
    let interrupted = || {
        let mut steps = scene.begin(&[]);
        assert!(steps.again(&|_| None).is_none());
        let result = scene.engine.arena().alloc(BYTES).expect("room");
        scene.launch(&result);
        scene.engine.library(vec![], place(&result), |_| Ok(()));
        steps.made(&|_| None, &[result.buffer()]);
        drop(steps);
        assert_eq!(scene.written().len(), 1);
    };
    (0..2 * TRIES).for_each(|_| interrupted());
    assert!(matches!(
        scene.lists.table().find(3, &[ADDRESS], &[]),
        Found::Leave
    ));
}

#[test]
fn a_result_in_the_memory_of_an_operand_takes_the_operand() {
    let scene = Scene::new();
    let given = memory_at(ADDRESS).buffer();
    let run = |operand: Operands<'_>| {
        let mut steps = scene.begin(&[]);
        let again = steps.again(operand);
        if again.is_none() {
            scene.launch(given.get().expect("of this device"));
            steps.made(&|_| Some(given.clone()), std::slice::from_ref(&given));
        }
        drop(steps);
        scene.written();
        again
    };
    assert!(run(&|_| None).is_none());
    let again = run(&|_| Some(given.clone())).expect("it came before");
    assert!(again[0].same(&given));
    assert!(run(&|_| None).is_none(), "somebody else holds it");
}

fn wanted<const N: usize>(launches: [u32; N]) -> [Wanted; N] {
    launches.map(|launch| Wanted { launch, result: 0 })
}

#[test]
fn a_list_whose_memory_is_free_is_made_as_a_whole() {
    let scene = Scene::new();
    let (kept, _) = scene.run(5, &[]);
    let (first, written) = (addresses(&kept), scene.written());
    drop(kept);
    let peak = scene.engine.arena().report().peak;
    for pass in 0..3 {
        let mut steps = scene.begin(&[]);
        assert!(steps.whole(&wanted([3, 4]), &|_| None), "pass {pass}");
        let kept = steps.results().expect("it was promised");
        drop(steps);
        assert_eq!(addresses(&kept), first);
        // Written down as a graph the first time, and replayed after that.
        let expected = if pass == 0 { written.clone() } else { vec![] };
        assert_eq!(scene.written(), expected, "pass {pass}");
        let report = scene.engine.arena().report();
        assert_eq!(report.live, 2 * BYTES as u64, "only what is wanted");
        assert!(report.peak >= peak);
    }
}

#[test]
fn a_list_is_no_whole_where_its_memory_is_in_use() {
    let scene = Scene::new();
    drop(scene.run(5, &[]));
    let written = scene.written();
    let arena = scene.engine.arena();
    let mut all: Vec<Memory> = (0..8).map(|_| arena.alloc(BYTES).expect("room")).collect();
    // A place that is only passed through, and not in the end.
    all.retain(|memory| place(memory).start == written[1]);
    assert_eq!(all.len(), 1);
    let mut steps = scene.begin(&[]);
    assert!(!steps.whole(&wanted([3, 4]), &|_| None));
    assert!(steps.results().is_none());
    drop(steps);
    drop(all);
    let mut steps = scene.begin(&[]);
    assert!(steps.whole(&wanted([3, 4]), &|_| None));
    assert!(!steps.whole(&wanted([3, 4]), &|_| None), "once");
    drop(steps);
    let mut steps = scene.begin(&[]);
    assert!(!steps.whole(&wanted([5]), &|_| None), "so many it has not");
    assert!(steps.again(&|_| None).is_some(), "it goes on one by one");
}

#[test]
fn a_whole_writes_to_operands_that_are_given_up_alone() {
    let scene = Scene::new();
    let given = memory_at(ADDRESS).buffer();
    let mut steps = scene.begin(&[]);
    assert!(steps.again(&|_| None).is_none());
    scene.launch(given.get().expect("of this device"));
    steps.made(&|_| Some(given.clone()), std::slice::from_ref(&given));
    drop(steps);
    scene.written();
    for wanted in [&wanted([0])[..], &[]] {
        let mut steps = scene.begin(&[]);
        assert!(!steps.whole(wanted, &|_| None), "somebody else holds it");
        assert!(steps.whole(wanted, &|_| Some(given.clone())));
        let results = steps.results().expect("it was promised");
        assert_eq!(results.len(), wanted.len());
        assert!(results.iter().all(|result| result.same(&given)));
    }
}

#[test]
fn a_whole_takes_the_memory_of_operands_that_are_given_up() {
    let scene = Scene::new();
    let arena = scene.engine.arena();
    let operand = || arena.alloc(BYTES).expect("room").buffer();
    let begin = |operand: &Buffer| {
        let list = List {
            number: 5,
            operands: &[operand],
            numbers: &[],
        };
        scene.lists.begin(&list).expect("operands of this device")
    };
    // The second result lies where the operand was.
    let first = operand();
    let at = addresses(&[first.clone()]);
    let mut steps = begin(&first);
    let mut launch = || {
        assert!(steps.again(&|_| None).is_none());
        let result = arena.alloc(BYTES).expect("room");
        scene.launch(&result);
        let result = result.buffer();
        steps.made(&|_| None, std::slice::from_ref(&result));
        result
    };
    let result = launch();
    drop(first);
    let results = [result, launch()];
    drop(steps);
    let places = addresses(&results);
    assert_eq!(places[1..], at);
    drop(results);
    scene.written();

    let again = operand();
    assert_eq!(addresses(&[again.clone()]), at);
    let mut steps = begin(&again);
    assert!(!steps.whole(&wanted([0, 1]), &|_| None), "it is held");
    let shared = again.get::<Memory>().expect("of this device").clone();
    assert!(
        !steps.whole(&wanted([0, 1]), &|_| Some(again.clone())),
        "by another name"
    );
    drop(shared);
    assert!(steps.whole(&wanted([0, 1]), &|_| Some(again.clone())));
    drop(again);
    let results = steps.results().expect("it was promised");
    drop(steps);
    assert_eq!(addresses(&results), places);
    assert_eq!(arena.report().live, 2 * BYTES as u64);
}

#[test]
fn lists_that_were_not_used_for_longest_go() {
    let listed = |count: usize| {
        let held = Held::Library(Arc::new(Library {
            identity: [0; 8],
            reads: SmallVec::new(),
            writes: 0..1,
            workspace: None,
            work: Box::new(|_| Ok(())),
        }));
        let listed = Listed {
            operands: vec![],
            numbers: vec![],
            steps: vec![],
            launches: vec![held; count],
            alone: OnceLock::new(),
            room: OnceLock::new(),
            graph: Mutex::default(),
        };
        listed.seen(true);
        Arc::new(listed)
    };
    let mut table = Table::default();
    let count = LIMIT / 1024;
    for number in 0..count as u64 {
        table.find(number, &[], &[]);
        assert!(table.keep(number, listed(1024)).is_empty());
    }
    assert!(matches!(table.find(0, &[], &[]), Found::Again(_)));
    assert_eq!(table.keep(1 << 32, listed(1024)).len(), 1);
    assert_eq!(table.launches, LIMIT);
    assert!(matches!(table.find(0, &[], &[]), Found::Again(_)));
    assert!(matches!(table.find(1, &[], &[]), Found::Write), "gone");
}

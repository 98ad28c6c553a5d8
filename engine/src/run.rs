//! Makes the launches of a plan.

use crate::{
    Options,
    cache::Cache,
    graph::{Graph, Key, Need, Node, fusable},
    groups::Reading,
    over::Pairs,
    plan::{Body, Fused, Number, Plan, Planner, Step},
    value::{self, State},
};
use anymesh_kernel::{
    Buffer, Device, Error, Kernel, Result, Scalar, View,
    backend::{Buffers, Form, List, MapCall, MapInput, RowProgramCall, Steps, Wanted},
};
use std::sync::{Arc, atomic::Ordering};

/// Lists after which nothing stays any longer: each has to look at what does.
const OLDEST: usize = 1024;

/// Runs lists of launches on the device below.
pub(crate) struct Runner {
    inner: Device,
    queue: u64,
    options: Options,
    planner: Planner,
    cache: Cache,
    /// What went wrong first since somebody was told.
    fault: Option<Error>,
    /// Memory for a list.
    pub(crate) spare: Vec<Option<Node>>,
    /// Launches that stay for the next list, and for how many lists some have.
    stay: Vec<Node>,
    age: usize,
}

impl Runner {
    pub(crate) fn new(inner: &Device, queue: u64, options: &Options) -> Self {
        Self {
            inner: inner.clone(),
            queue,
            options: options.clone(),
            planner: Planner::default(),
            cache: Cache::new(options.plans),
            fault: None,
            spare: vec![],
            stay: vec![],
            age: 0,
        }
    }

    pub(crate) fn take_fault(&mut self) -> Option<Error> {
        self.fault.take()
    }

    pub(crate) fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    /// Puts what stayed of earlier lists, and somebody still wants, before a list. Returns how many
    /// launches these are.
    fn unite(&mut self, nodes: &mut Vec<Option<Node>>) -> usize {
        let mut stay = std::mem::take(&mut self.stay);
        // From the last one on, because one may be the only reader of another.
        for k in (0..stay.len()).rev() {
            let wanted = |buffer: &Buffer| {
                let waits = matches!(value::state(self.queue, buffer), Ok(State::Pending));
                waits && buffer.handles() > 1
            };
            if !stay[k].outputs.iter().any(wanted) {
                stay.remove(k);
            }
        }
        let count = stay.len();
        nodes.splice(0..0, stay.into_iter().map(Some));
        count
    }

    /// Whether anything stayed of earlier lists.
    pub(crate) fn has_stayed(&self) -> bool {
        !self.stay.is_empty()
    }

    /// Runs a list of this form, after what stayed of earlier ones. What fails is an error of its results.
    pub(crate) fn run(&mut self, nodes: &mut Vec<Option<Node>>, form: Form, need: Need<'_>) {
        let stayed = self.unite(nodes);
        if nodes.is_empty() {
            return;
        }
        self.age = if stayed > 0 { self.age + 1 } else { 0 };
        let need = if self.age > OLDEST { Need::All } else { need };
        let of_stayed = (stayed > 0).then(|| {
            let mut form = Form::like(None);
            let stayed = nodes.iter().take(stayed).flatten();
            stayed.for_each(|node| form.add(&node.kernel));
            form.done()
        });
        let mut graph = Graph::new(nodes, need);
        let key = graph.key((stayed, of_stayed), form);
        let plan = self.plan(&mut graph, stayed, key);
        plan.kept.iter().for_each(|source| graph.hold(*source));
        let inner = self.inner.clone();
        let mut steps = None;
        if let Some(number) = plan.number
            && let Some(operands) = self.operands(&graph)
        {
            steps = list(&inner, &graph, number, &operands);
            let given_up = |k: usize| given_up(&graph, &operands, k);
            if let Some(steps) = &mut steps
                && steps.whole(&plan.wanted, &given_up)
            {
                return self.whole(nodes, &plan, steps.as_mut());
            }
        }
        let (before, mut most) = (inner.memory().in_use, 0);
        for dead in &plan.dead {
            nodes[*dead as usize] = None;
        }
        for ((step, gone), over) in plan.steps.iter().zip(&plan.after).zip(&plan.over) {
            let listed = steps.as_deref_mut();
            match step {
                Step::Single(node) => self.single(nodes, *node, over, listed),
                Step::Fused(fused) => self.fused(nodes, fused, over, listed),
            }
            most = most.max(inner.memory().in_use.saturating_sub(before));
            for node in gone {
                nodes[*node as usize] = None;
            }
        }
        plan.most.fetch_max(most, Ordering::Relaxed);
        self.stay = stay(nodes, &plan);
    }

    fn plan(&mut self, graph: &mut Graph<'_>, stayed: usize, key: Key) -> Arc<Plan> {
        if let Some(plan) = self.cache.get(&key) {
            return plan;
        }
        if !self.options.first && self.cache.is_new(&key) {
            return Arc::new(Plan::unfused(graph));
        }
        let supports = |kernel: &Kernel| self.inner.backend().supports(kernel);
        let plan = self.planner.plan(graph, stayed, &self.options, &supports);
        let plan = Arc::new(plan);
        if plan.complete {
            self.cache.insert(key, plan.clone());
        }
        plan
    }

    /// The inner buffers of what a list reads, where there are all of them.
    fn operands<'n>(&self, graph: &Graph<'n>) -> Option<Vec<&'n Buffer>> {
        let ready = |buffer: &&'n Buffer| match value::state(self.queue, buffer) {
            Ok(State::Ready(inner)) => Some(inner),
            _ => None,
        };
        graph.buffers.iter().map(ready).collect()
    }

    /// Lets go of a list whose launches the device makes by itself, and hands out what somebody holds.
    fn whole(&mut self, nodes: &mut [Option<Node>], plan: &Plan, steps: &mut (dyn Steps + '_)) {
        self.stay = stay(nodes, plan);
        let value = |wanted: &Wanted| {
            let (node, output) = plan.steps[wanted.launch as usize].result(wanted.result)?;
            let node = nodes[node as usize].as_ref()?;
            node.outputs.get(usize::from(output)).cloned()
        };
        let values: Vec<Option<Buffer>> = plan.wanted.iter().map(value).collect();
        self.inner.passes(plan.most.load(Ordering::Relaxed));
        nodes.fill_with(|| None);
        let results = steps.results().filter(|all| all.len() == values.len());
        let Some(results) = results else {
            let error = self.mistake("a list that was promised was not made");
            for value in values.iter().flatten() {
                value::settle(value, Err(error.clone()));
            }
            self.fault.get_or_insert(error);
            return;
        };
        for (value, result) in values.iter().zip(results) {
            if let Some(value) = value {
                value::settle(value, Ok(self.inner.adopt(result)));
            }
        }
    }

    /// The inner buffer of an operand, or why there is none.
    fn ready(&self, buffer: &Buffer) -> Result<Buffer> {
        match value::state(self.queue, buffer)? {
            State::Ready(inner) => Ok(inner.clone()),
            State::Failed(error) => Err(error.clone()),
            State::Pending => Err(self.mistake("a value was needed before it was computed")),
        }
    }

    fn mistake(&self, what: &str) -> Error {
        Error::DeviceFailed {
            device: self.inner.name().into(),
            detail: format!(
                "{what}: this is a mistake of the engine; set ANYMESH_EAGER=1 to run without it"
            ),
        }
    }

    /// A launch as it was written down.
    fn single(
        &mut self,
        nodes: &[Option<Node>],
        number: u32,
        over: &Pairs,
        mut listed: Option<&mut (dyn Steps + '_)>,
    ) {
        let Some(node) = &nodes[number as usize] else {
            return;
        };
        let operand = |k: usize| {
            let view = node.kernel.operands().nth(k)?;
            self.ready(&view.buffer).ok()
        };
        let given_up = |k: usize| operand(k).filter(|buffer| gives_up(over, k, buffer));
        let again = listed.as_mut().and_then(|steps| steps.again(&given_up));
        if let Some(results) = again {
            for (output, buffer) in node.outputs.iter().zip(results) {
                value::settle(output, Ok(self.inner.adopt(buffer)));
            }
            return;
        }
        let kernel = || {
            let mut kernel = node.kernel.clone();
            for view in kernel.operands_mut() {
                view.buffer = self.ready(&view.buffer)?;
            }
            set_over(&mut kernel, over);
            Ok(kernel)
        };
        // What fails because an operand did is no fault of its own.
        let done = match kernel() {
            Ok(kernel) => self.inner.launch(kernel).map_err(|error| (error, true)),
            Err(error) => Err((error, false)),
        };
        match done {
            Ok(views) => {
                let buffers: Buffers = views.into_iter().map(|view| view.buffer).collect();
                if let Some(steps) = listed {
                    steps.made(&operand, &buffers);
                }
                (node.outputs.iter().zip(buffers))
                    .for_each(|(output, buffer)| value::settle(output, Ok(buffer)));
            }
            Err((error, own)) => {
                if own {
                    self.fault.get_or_insert_with(|| error.clone());
                }
                (node.outputs.iter()).for_each(|output| value::settle(output, Err(error.clone())));
            }
        }
    }

    fn fused(
        &mut self,
        nodes: &[Option<Node>],
        fused: &Fused,
        over: &Pairs,
        mut listed: Option<&mut (dyn Steps + '_)>,
    ) {
        let operand = |k: usize| self.read(nodes, fused.inputs().get(k)?).ok();
        let given_up = |k: usize| operand(k).filter(|buffer| gives_up(over, k, buffer));
        let again = listed.as_mut().and_then(|steps| steps.again(&given_up));
        let done = match again {
            Some(results) => Ok(results
                .into_iter()
                .map(|buffer| self.inner.adopt(buffer))
                .collect()),
            None => self.kernel(nodes, fused).and_then(|mut kernel| {
                set_over(&mut kernel, over);
                let views = self.inner.launch(kernel)?;
                let buffers: Buffers = views.into_iter().map(|view| view.buffer).collect();
                if let Some(steps) = &mut listed {
                    steps.made(&operand, &buffers);
                }
                Ok(buffers)
            }),
        };
        match done {
            Ok(buffers) => {
                for ((node, output), buffer) in fused.outputs.iter().zip(buffers) {
                    if let Some(node) = &nodes[*node as usize] {
                        value::settle(&node.outputs[usize::from(*output)], Ok(buffer));
                    }
                }
            }
            // Parts of it may not need what failed, and a kernel that the device refuses may be
            // fine in parts: one by one everything is as it would have been without the engine.
            Err(_) => {
                for node in &fused.nodes {
                    self.single(nodes, *node, &Pairs::new(), None);
                }
            }
        }
    }

    fn node<'n>(&self, nodes: &'n [Option<Node>], number: u32) -> Result<&'n Node> {
        let node = nodes[number as usize].as_ref();
        node.ok_or_else(|| self.mistake("a launch was let go too early"))
    }

    /// The inner buffer that is read.
    fn read(&self, nodes: &[Option<Node>], reading: &Reading) -> Result<Buffer> {
        let (number, operand) = reading.at;
        let kernel = &self.node(nodes, number)?.kernel;
        let view = kernel.operands().nth(usize::from(operand));
        self.ready(
            &view
                .ok_or_else(|| self.mistake("a launch lacks an operand"))?
                .buffer,
        )
    }

    /// What is read, of the device below.
    fn view(&self, nodes: &[Option<Node>], reading: &Reading) -> Result<View> {
        Ok(View {
            buffer: self.read(nodes, reading)?,
            dtype: reading.dtype,
            layout: reading.layout.clone(),
        })
    }

    /// The kernel of several launches.
    fn kernel(&self, nodes: &[Option<Node>], fused: &Fused) -> Result<Kernel> {
        let (joined, reduce) = match &fused.body {
            Body::Map { joined, reduce } => (joined, reduce),
            Body::Rows {
                program,
                inputs,
                numbers,
                over,
            } => {
                let number = |number: &Number| match *number {
                    Number::Known(number) => Ok(number),
                    Number::Of(node, k) => {
                        let numbers = self.node(nodes, node)?.kernel.numbers();
                        let lacks = || self.mistake("a launch lacks a number");
                        numbers.get(k).copied().ok_or_else(lacks)
                    }
                };
                let view = |reading: &Reading| self.view(nodes, reading);
                return Ok(RowProgramCall {
                    op: fused.op,
                    program: program.clone(),
                    shape: fused.shape.clone(),
                    inputs: inputs.iter().map(view).collect::<Result<_>>()?,
                    params: numbers.iter().map(number).collect::<Result<_>>()?,
                    over: *over,
                }
                .into());
            }
        };
        let call_of = |number: usize| {
            let call = fusable(&self.node(nodes, number as u32)?.kernel);
            call.ok_or_else(|| self.mistake("a launch has no program"))
        };
        let mut call = MapCall {
            op: fused.op,
            program: joined.program.clone(),
            shape: fused.shape.clone(),
            inputs: Default::default(),
            indices: joined.indices.iter().cloned().collect(),
            params: Default::default(),
            over: Default::default(),
        };
        for reading in &joined.inputs {
            call.inputs.push(MapInput {
                view: self.view(nodes, reading)?,
                window: reading.window.clone(),
            });
        }
        for (number, k) in &joined.params {
            call.params.push(call_of(*number)?.params[*k]);
        }
        let Some(reduce) = *reduce else {
            return Ok(call.into());
        };
        match &self.node(nodes, reduce)?.kernel {
            Kernel::Reduce(reduce) => Ok(anymesh_kernel::backend::ReduceCall {
                map: call,
                ..reduce.clone()
            }
            .into()),
            _ => Err(self.mistake("a reduction is none")),
        }
    }
}

/// The launches of a list that stay for the next one.
fn stay(nodes: &mut [Option<Node>], plan: &Plan) -> Vec<Node> {
    let stay = plan.stay.iter();
    stay.filter_map(|n| nodes[*n as usize].take()).collect()
}

/// Tells the device of a list: one that came before costs it less than its launches one by one.
fn list<'i>(
    inner: &'i Device,
    graph: &Graph<'_>,
    number: u64,
    operands: &[&Buffer],
) -> Option<Box<dyn Steps + 'i>> {
    let numbers: Vec<Scalar> = (graph.kernels.iter())
        .flat_map(|kernel| kernel.numbers().iter().copied())
        .collect();
    inner.list(&List {
        number,
        operands,
        numbers: &numbers,
    })
}

/// Operand `k` of a list, if its memory is free as soon as the list is let go.
fn given_up(graph: &Graph<'_>, operands: &[&Buffer], k: usize) -> Option<Buffer> {
    let inner = *operands.get(k)?;
    // What is no value of this device is held by the list itself.
    let own = std::ptr::eq(inner, graph.buffers[k]);
    let alone = own || inner.handles() == 1;
    (alone && !graph.outside[k].held).then(|| inner.clone())
}

/// Whether a result takes the memory of operand `k`, which nobody holds but its value and the caller.
fn gives_up(over: &Pairs, k: usize, buffer: &Buffer) -> bool {
    over.iter().any(|(_, operand)| *operand == k) && buffer.handles() == 2
}

/// Has results take the memory of operands, of those that nobody else holds.
fn set_over(kernel: &mut Kernel, over: &Pairs) {
    if !over.is_empty() || !kernel.over().is_empty() {
        let sole = |(_, k): &(usize, usize)| {
            let operand = kernel.operands().nth(*k);
            operand.is_some_and(|view| gives_up(over, *k, &view.buffer))
        };
        let pairs: Pairs = over.iter().copied().filter(sole).collect();
        kernel.set_over(&pairs);
    }
}

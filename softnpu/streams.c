/* Streams, events, and the graphs that are captured from streams.
 *
 * Streams are synchronous, events are timestamps. While a stream is captured, nothing that is launched on it runs:
 * softnpu/graph_capture.py keeps it, and runs it when the graph is replayed. What is refused meanwhile is what CANN's
 * documentation of aclmdlRICaptureBegin and aclmdlRICaptureThreadExchangeMode says; the codes are those of
 * acl/error_codes/rt_error_codes.h. Where no source says which code CANN gives, the one whose comment fits is given. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };
enum { CAPTURE_NONE, CAPTURE_ACTIVE };

struct stream {
    struct graph *graph;       /* that it is captured into */
    uint64_t launched, joined; /* launches since the capture began, and how many of them another stream waits for */
    uint32_t id;
    struct stream *next;
};
struct graph {
    struct stream *origin; /* until its capture ends */
    int mode;
    uint32_t id;
    pthread_t thread;
    struct graph *next;
};
struct event {
    double milliseconds;
    struct graph *graph;  /* in whose capture it was recorded last */
    uint32_t graph_id;    /* of it: a graph that is gone may have its address taken by another one */
    struct stream *stream;
    uint64_t launched;
};

typedef int (*listener)(int what, void *graph, void *stream, void *to, const void *from, uint64_t size, int value);
static listener on_graph;
static struct stream *streams;
static struct graph *captures; /* those that are underway */
static uint64_t stream_syncs;
static uint32_t last_id;
static __thread int thread_mode = MODE_GLOBAL;
static pthread_mutex_t lists = PTHREAD_MUTEX_INITIALIZER;

void softnpu_on_graph(listener f) { on_graph = f; }
uint64_t softnpu_stream_syncs(void) { return stream_syncs; }

aclError tell(void *stream, enum happening what, void *to, const void *from, size_t size, int value) {
    if (!on_graph) return ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    return on_graph(what, stream ? ((struct stream *)stream)->graph : NULL, stream, to, from, size, value);
}
int in_capture(void *stream) { return stream && ((struct stream *)stream)->graph; }

/* Say whether this thread may not call what the documentation calls unsafe functions: aclrtMemset, aclrtMemcpy. */
int unsafe_now(void) {
    int unsafe = 0;
    if (!captures || thread_mode == MODE_RELAXED) return 0;
    pthread_mutex_lock(&lists);
    for (struct graph *g = captures; g; g = g->next)
        unsafe |= g->mode == MODE_GLOBAL || (g->mode == MODE_THREAD_LOCAL && pthread_equal(g->thread, pthread_self()));
    pthread_mutex_unlock(&lists);
    return unsafe;
}
static aclError refuse(aclError code, const char *what) {
    snprintf(message, sizeof message, "%s, which cannot be while a graph is captured", what);
    return code;
}
aclError refuse_while_capturing(const char *what) { return refuse(ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT, what); }

/* streams */
aclError aclrtCreateStream(void **s) {
    struct stream *fresh = calloc(1, sizeof *fresh);
    if (!fresh) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&lists);
    fresh->id = ++last_id;
    fresh->next = streams;
    streams = fresh;
    pthread_mutex_unlock(&lists);
    *s = fresh;
    return ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(void **s, uint32_t priority, uint32_t flag) { return aclrtCreateStream(s); }
aclError aclrtDestroyStream(void *s) {
    if (in_capture(s)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "a stream is destroyed");
    pthread_mutex_lock(&lists);
    struct stream **at = &streams;
    while (*at && *at != s) at = &(*at)->next;
    if (*at) *at = (*at)->next;
    pthread_mutex_unlock(&lists);
    free(s);
    return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(void *s) { return aclrtDestroyStream(s); }
aclError aclrtSynchronizeStream(void *s) {
    if (in_capture(s)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "the host waits for a stream");
    COUNT(stream_syncs);
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeStreamWithTimeout(void *s, int ms) { return aclrtSynchronizeStream(s); }
aclError aclrtSynchronizeDevice(void) {
    if (captures) return refuse_while_capturing("the host waits for the device");
    COUNT(stream_syncs);
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeDeviceWithTimeout(int ms) { return aclrtSynchronizeDevice(); }
aclError aclrtStreamQuery(void *s, int *status) {
    if (in_capture(s)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "the host asks how far a stream is");
    *status = STREAM_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(struct stream *s, int32_t *id) { *id = s ? s->id : 0; return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(void *s, int attribute, void *value) { return ACL_SUCCESS; }

/* events */
aclError aclrtCreateEventExWithFlag(void **e, uint32_t flag) {
    *e = calloc(1, sizeof(struct event));
    return *e ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}
aclError aclrtCreateEventWithFlag(void **e, uint32_t flag) { return aclrtCreateEventExWithFlag(e, flag); }
aclError aclrtDestroyEvent(void *e) { free(e); return ACL_SUCCESS; }
aclError aclrtResetEvent(void *e, void *s) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(void *e, int *status) { *status = EVENT_COMPLETE; return ACL_SUCCESS; }
aclError aclrtQueryEventWaitStatus(void *e, int *status) { *status = WAIT_COMPLETE; return ACL_SUCCESS; }
aclError aclrtRecordEvent(struct event *e, struct stream *s) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    *e = (struct event){t.tv_sec * 1e3 + t.tv_nsec * 1e-6, in_capture(s) ? s->graph : NULL};
    if (e->graph) {
        e->graph_id = e->graph->id;
        e->stream = s;
        e->launched = s->launched;
    }
    return ACL_SUCCESS;
}
aclError aclrtSynchronizeEvent(struct event *e) {
    if (e->graph) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "the host waits for an event of a graph");
    COUNT(stream_syncs);
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *ms, struct event *a, struct event *b) {
    if (a->graph || b->graph) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "the time of an event of a graph is asked for");
    *ms = b->milliseconds - a->milliseconds;
    return ACL_SUCCESS;
}
static int underway(struct event *e) {
    for (struct graph *g = captures; g; g = g->next)
        if (g == e->graph && g->id == e->graph_id) return 1;
    return 0;
}
/* A stream that waits for an event of a capture belongs to the capture from then on; a captured one that waits for an
 * event of elsewhere would depend on what is over when the graph is replayed. */
aclError aclrtStreamWaitEvent(struct stream *s, struct event *e) {
    if (!e->graph) {
        if (!in_capture(s) || !e->milliseconds) return ACL_SUCCESS;
        return refuse(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream waits for an event of another one");
    }
    if (!underway(e)) return refuse(ACL_ERROR_RT_EVENT_CAPTURED, "a stream waits for an event of a graph");
    if (in_capture(s) && s->graph != e->graph)
        return refuse(ACL_ERROR_RT_CAPTURE_DEPENDENCY, "a captured stream waits for an event of another capture");
    if (!in_capture(s)) {
        s->graph = e->graph;
        s->launched = s->joined = 0;
        aclError error = tell(s, JOIN, NULL, NULL, 0, 0);
        if (error) return error;
    }
    if (s != e->stream && e->stream->joined < e->launched) e->stream->joined = e->launched;
    return ACL_SUCCESS;
}

/* graphs */
void softnpu_launched(struct stream *s) { s->launched++; }
aclError aclmdlRICaptureBegin(struct stream *s, int mode) {
    if (in_capture(s)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "the capture of a stream begins");
    struct graph *g = calloc(1, sizeof *g);
    if (!g) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    *g = (struct graph){.origin = s, .mode = mode, .thread = pthread_self()};
    s->graph = g;
    s->launched = s->joined = 0;
    pthread_mutex_lock(&lists);
    g->id = ++last_id;
    g->next = captures;
    captures = g;
    pthread_mutex_unlock(&lists);
    return tell(s, BEGIN, NULL, NULL, 0, 0);
}
aclError aclmdlRICaptureGetInfo(struct stream *s, int *status, void **graph) {
    *status = in_capture(s) ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (graph) *graph = in_capture(s) ? s->graph : NULL;
    return ACL_SUCCESS;
}
aclError aclmdlRIGetId(struct graph *g, uint32_t *id) { *id = g->id; return ACL_SUCCESS; }
aclError aclmdlRICaptureEnd(struct stream *s, void **graph) {
    struct graph *g = s->graph;
    if (!g) return ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    if (g->origin != s) return ACL_ERROR_RT_STREAM_CAPTURE_UNMATCHED;
    if (g->mode != MODE_RELAXED && !pthread_equal(g->thread, pthread_self())) return ACL_ERROR_RT_STREAM_CAPTURE_WRONG_THREAD;
    aclError error = tell(s, END, NULL, NULL, 0, 0);
    pthread_mutex_lock(&lists);
    struct graph **at = &captures;
    while (*at != g) at = &(*at)->next;
    *at = g->next;
    for (struct stream *other = streams; other; other = other->next) {
        if (other->graph != g) continue;
        if (other != s && other->joined < other->launched && !error) {
            error = ACL_ERROR_RT_STREAM_UNJOINED;
            snprintf(message, sizeof message, "a capture ends before its stream waits for all other streams in it");
        }
        other->graph = NULL;
    }
    pthread_mutex_unlock(&lists);
    *graph = g;
    return error;
}
aclError aclmdlRICaptureThreadExchangeMode(int *mode) {
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(struct graph *g, struct stream *s) {
    if (in_capture(s)) return refuse(ACL_ERROR_RT_STREAM_CAPTURED, "a graph is replayed");
    return on_graph ? on_graph(REPLAY, g, s, NULL, NULL, 0, 0) : ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
}
aclError aclmdlRIDestroy(struct graph *g) {
    if (on_graph) on_graph(DESTROY, g, NULL, NULL, NULL, 0, 0);
    free(g);
    return ACL_SUCCESS;
}

/* Launches of a graph that can be changed later: what is launched between Begin and End makes a group, and what is
 * launched between the beginning and the end of an update takes their place. */
aclError aclmdlRICaptureTaskGrpBegin(void *s) { return tell(s, GROUP_BEGIN, NULL, NULL, 0, 0); }
aclError aclmdlRICaptureTaskGrpEnd(void *s, void **group) { return tell(s, GROUP_END, group, NULL, 0, 0); }
aclError aclmdlRICaptureTaskUpdateBegin(void *s, void *group) { return tell(s, UPDATE_BEGIN, group, NULL, 0, 0); }
aclError aclmdlRICaptureTaskUpdateEnd(void *s) { return tell(s, UPDATE_END, NULL, NULL, 0, 0); }

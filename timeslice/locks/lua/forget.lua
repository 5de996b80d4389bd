--[[
Takes a node out of the group by order of an operator, who knows that it is gone for good.
ARGV  1 floor  2 node  3 by whom  4 why, or ''  then the jobs whose state on it is given up
Reply ok (also if it is no member: asked again) | alive ms_left (of its heartbeat) | state job ... (state on it that was not given up)
Events NodeLeft, and what advance and reap emit
--]]
-- @include group waiters gangs residency nodes lease advance
local node, given_up = ARGV[2], {}
for i = 5, #ARGV do
  given_up[ARGV[i]] = true
end

begin(true)
settle_clock()
local deadline = redis.call('ZSCORE', nodes_key, node)
deadline = deadline and tonumber(deadline)
-- What a job has on a node that nobody has seen it on is only presumed. It is not there if the job has said where its
-- processes are, and none of them is there.
local places = {}
for _, field in ipairs(redis.call('HKEYS', targets_key)) do
  local job, at = string.match(field, '^([^/]+)/([^/]+)/')
  if job then
    places[job] = places[job] or {}
    places[job][at] = true
  end
end
local function is_elsewhere(job, where)
  local observed = redis.call('HEXISTS', members_key, node .. '/' .. job .. '/backend') == 1
  return where == 'resident' and not observed and places[job] and not places[job][node]
end

local lost, kept = {}, { 'state' }
for job, where in pairs(deadline and node_record(node) or {}) do
  local list = (OUT[where] and where ~= 'suspended' or is_elsewhere(job, where)) and {} or given_up[job] and lost or kept
  list[#list + 1] = job
end
if deadline and deadline < now and #kept == 1 then
  node_remove(node, ARGV[3], ARGV[4], table.concat(lost, ' '))
end
reap()
advance()
save()
if deadline and deadline >= now then
  return { 'alive', deadline - now }
elseif #kept > 1 then
  return kept
end
return { 'ok' }
